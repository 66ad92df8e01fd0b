// Numbers of the device on the CPU: conversions and products that CUDA and PTX define bit by bit.
// Compiled without contraction; subnormals are kept.

namespace emulator {

inline float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
inline u32 as_bits(float value) { return __builtin_bit_cast(u32, value); }

constexpr u32 NAN_BITS = 0x7FFFFFFFu;  // of min.NaN and max.NaN

inline bool is_nan(float value) { return value != value; }

// Bits of the nearest bf16, ties to even; a NaN is 0x7FFF, as of cvt.
inline u32 to_bf16(float value) {
    u32 bits = as_bits(value);
    if (is_nan(value)) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline float from_bf16(u32 bits) { return as_float(bits << 16); }

// mul.rn.bf16. The product of two mantissas of 8 bits is exact in float unless it is subnormal
// there; doubles hold it then, and what is kept are multiples of 2^-133.
inline u32 bf16_product(u32 a, u32 b) {
    float product = from_bf16(a & 0xFFFF) * from_bf16(b & 0xFFFF);
    float size = __builtin_fabsf(product);
    if (is_nan(product) || size >= 0x1p-120f) return to_bf16(product);
    double exact = double(from_bf16(a & 0xFFFF)) * double(from_bf16(b & 0xFFFF));
    double least =
        size >= 0x1p-126f ? 0x1p-7 * __builtin_exp2(__builtin_floor(__builtin_log2(size))) : 0x1p-133;
    float rounded = float(__builtin_rint(exact / least) * least);
    return as_bits(__builtin_copysignf(rounded, product)) >> 16;
}

inline u32 bf16_products(u32 pair, u32 factor) {
    return bf16_product(pair, factor) | bf16_product(pair >> 16, factor) << 16;
}

// cvt.rn.satfinite.e4m3: 448 at most, multiples of 2^-9 at least; a NaN is 0x7F.
inline u32 to_e4m3(float value) {
    u32 sign = as_bits(value) >> 31 << 7;
    float size = __builtin_fabsf(value);
    if (is_nan(value)) return 0x7F;
    if (size >= 464.0f) return sign | 0x7E;
    u32 field = as_bits(size) >> 23;
    int exponent = field < 121 ? -6 : int(field) - 127;
    u32 steps = u32(__builtin_rintf(size * as_float(u32(127 + 3 - exponent) << 23)));
    // 16 steps are the next power of two, and the carry says so.
    u32 code = u32(exponent + 7) * 8 + steps - 8;
    if (field < 121) code = steps;
    return sign | (code > 0x7E ? 0x7E : code);
}

inline float from_e4m3(u32 code) {
    u32 field = code >> 3 & 15, mantissa = code & 7;
    float size =
        field ? float(8 + mantissa) * as_float((field + 117) << 23) : float(mantissa) * 0x1p-9f;
    if ((code & 0x7F) == 0x7F) size = as_float(NAN_BITS);
    return code & 0x80 ? -size : size;
}

}  // namespace emulator

// ---- what CUDA gives

inline float __uint_as_float(u32 bits) { return emulator::as_float(bits); }
inline float __int_as_float(int bits) { return emulator::as_float(u32(bits)); }
inline u32 __float_as_uint(float value) { return emulator::as_bits(value); }
inline int __float_as_int(float value) { return int(emulator::as_bits(value)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float rintf(float value) { return __builtin_rintf(value); }
inline int __popc(u32 word) { return __builtin_popcount(word); }
inline int __ffs(u32 word) { return __builtin_ffs(int(word)); }
inline int __clz(u32 word) { return word ? __builtin_clz(word) : 32; }

inline int __float2int_rn(float value) {
    if (emulator::is_nan(value)) return 0;
    if (value >= 0x1p31f) return 0x7FFFFFFF;
    if (value < -0x1p31f) return int(0x80000000u);
    return int(__builtin_rintf(value));
}

inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) {
    return u32((u64(high) << 32 | low) >> (shift & 31));
}

// prmt, with the signs that bit 3 of a nibble picks.
inline u32 permute(u32 low, u32 high, u32 selector) {
    u64 eight = u64(high) << 32 | low;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        u32 nibble = selector >> (4 * i) & 15, byte = u32(eight >> (nibble % 8 * 8)) & 0xFF;
        if (nibble & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << (8 * i);
    }
    return result;
}

inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    return permute(low, high, selector & 0x7777u);
}

// ---- arithmetic of ptx.cuh

inline u32 times_low(u32 pair, u32 factors) { return emulator::bf16_products(pair, factors); }
inline u32 times_high(u32 pair, u32 factors) { return emulator::bf16_products(pair, factors >> 16); }

inline float min_nan(float a, float b) {
    if (emulator::is_nan(a) || emulator::is_nan(b)) return emulator::as_float(emulator::NAN_BITS);
    if (a == b) return emulator::as_float(emulator::as_bits(a) | emulator::as_bits(b));  // -0 < +0
    return a < b ? a : b;
}

inline float max_nan(float a, float b) {
    if (emulator::is_nan(a) || emulator::is_nan(b)) return emulator::as_float(emulator::NAN_BITS);
    if (a == b) return emulator::as_float(emulator::as_bits(a) & emulator::as_bits(b));
    return a > b ? a : b;
}

inline u32 round_bf16x2(float low, float high) {
    u32 first = emulator::is_nan(low) ? 0x7FC0 : emulator::to_bf16(low);
    u32 second = emulator::is_nan(high) ? 0x7FC0 : emulator::to_bf16(high);
    return first | second << 16;
}

inline u32 round_e4m3x2(float low, float high) {
    return emulator::to_e4m3(low) | emulator::to_e4m3(high) << 8;
}

inline u32 e4m3x2_to_bf16x2(u32 codes) {
    float low = emulator::from_e4m3(codes & 0xFF), high = emulator::from_e4m3(codes >> 8 & 0xFF);
    return emulator::to_bf16(low * 256.0f) | emulator::to_bf16(high * 256.0f) << 16;
}
