"""Speed of models on CPUs: 8-bit products, norms, the allocator, and the choice of types.

Nothing here changes results beyond rounding, and nothing is needed on a GPU.
"""
