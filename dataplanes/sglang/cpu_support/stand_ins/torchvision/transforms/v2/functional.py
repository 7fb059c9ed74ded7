"""Stand-in for `torchvision.transforms.v2.functional`."""

import torchvision
from torchvision.transforms import InterpolationMode as InterpolationMode


def __getattr__(name):
    return torchvision.refuse(__name__, name)
