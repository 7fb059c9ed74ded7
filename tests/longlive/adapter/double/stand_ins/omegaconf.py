"""Stands in for OmegaConf where it is not installed: a mapping whose keys are attributes, too. Tests only."""

import yaml


class _Config(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value


def _wrap(value):
    if isinstance(value, dict):
        return _Config({key: _wrap(one) for key, one in value.items()})
    return value


class OmegaConf:
    @staticmethod
    def load(path):
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (as little as possible)
            return _wrap(yaml.safe_load(file))
