"""Stand-in for `torchvision.transforms.v2`."""

import torchvision
from torchvision.transforms import InterpolationMode as InterpolationMode


def __getattr__(name):
    return torchvision.refuse(__name__, name)
