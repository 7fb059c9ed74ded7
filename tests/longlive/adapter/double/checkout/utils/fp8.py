"""Contract double, not LongLive."""


def quantize_model_fp8(model, *, verbose=False):
    model.is_fp8 = True
    return 1
