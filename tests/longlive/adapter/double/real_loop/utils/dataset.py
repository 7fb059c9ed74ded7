"""Stands in for LongLive's data sets: the one constant that the loop takes."""

DEFAULT_SCENE_CUT_PREFIX = "The scene transitions. "
