"""Fast paths in a box: the fused chain of planar and LU maps, for CPUs and CUDA devices."""
