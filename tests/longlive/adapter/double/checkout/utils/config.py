"""Contract double, not LongLive: sections are copied to the root; a value in its section counts first."""

wan_default_config = {"Wan2.2-TI2V-5B": {"num_heads": 2, "head_dim": 4, "num_transformer_blocks": 2}}


def section_get(config, section_key, key, default=None, aliases=()):
    section = config.get(section_key, None)
    if section is not None and key in section:
        return section[key]
    return config.get(key, default)


def normalize_config(config):
    for name in ("data", "inference", "logging", "checkpoints"):
        for key, value in (config.get(name, None) or {}).items():
            config[key] = value
    config["num_frame_per_block"] = config["model_kwargs"]["num_frame_per_block"]
    return config
