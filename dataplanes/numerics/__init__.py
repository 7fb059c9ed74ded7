"""Number formats that the KV codecs and the video plane share.

Every format is a pair of pure torch functions, the same source for every device:

- `hadamard`: seeded randomised Hadamard transform over the head dimension (blocked where it is no power of two);
- `levels`: any number (2..256) of equal cells over a group's range;
- `absmax`: symmetric levels with a step from a group's largest magnitude;
- `lloyd_max`: a codebook for Gaussian coordinates, with a scale per vector;
- `fp8`: e4m3 bytes with one scale per head vector;
- `nvfp4`: e2m1 codes in blocks of 16 with e4m3 block scales and one outer scale per token, or Transformer Engine's form
  of it; plain and 4over6, blocks of a row or squares;
- `nvfp4_tensor`: packed codes, block scales and peaks of a whole tensor, by `native` kernels where there is a compiler;
- `stochastic`: NVFP4 that is right on average; `hadamard16`: the transform of 16 that goes with it in training (both a
  library: no plane uses them);
- `code_layout`: two codes to a byte, and block scales where tensor cores read them;
- `fp8_rows`: e4m3 with a float32 scale per row or per tensor, by `native` kernels likewise;
- `packing`: several small symbols in one byte, mixed radix;
- `bounds`: how far each format may land from its input.

Inputs are finite and below 2**96 in magnitude, which the caller checks once; all-zero, constant, subnormal and wildly
uneven inputs are fine.
"""
