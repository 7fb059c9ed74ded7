"""Stand-in for `torchvision.io`; transformers names the enum in signatures."""

import enum

import torchvision


class ImageReadMode(enum.Enum):
    """Names only."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def __getattr__(name):
    return torchvision.refuse(__name__, name)
