"""The search process: the only part of controld that may import torch and BoTorch."""
