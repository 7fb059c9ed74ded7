"""The LongLive data plane: a video engine whose precision, steps, window and decoding controld steers."""
