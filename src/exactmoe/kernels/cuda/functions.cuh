// The fixed functions of the contract, section 1.

__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}

__device__ __forceinline__ float exp32(float x) {
    x = max_nan(min_nan(x, 89.0f), -104.0f);
    float n = rintf(__fmul_rn(x, 1.44269504088896340736f));
    float r = __fmaf_rn(n, -0.693359375f, x);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = 1.0f / 5040.0f;
    p = __fmaf_rn(p, r, 1.0f / 720.0f);
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    // A NaN converts to 0 and comes back through p.
    int whole = __float2int_rn(n), half = whole >> 1;
    return __fmul_rn(__fmul_rn(p, power_of_two(half)), power_of_two(whole - half));
}

__device__ __forceinline__ float silu(float g) {
    return __fdiv_rn(g, __fadd_rn(1.0f, exp32(-g)));
}
