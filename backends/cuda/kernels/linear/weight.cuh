/*
 * Packed weights, element by element. FORMAT and OTHER_FORMAT say how; `at` is for kernels that do not care for speed.
 *
 * Dense rows are padded to 16 bytes. Blocks of 32 lie in two planes: integers (16 or 32 bytes a block), then scales (f16, for
 * Q4_1 scale and minimum in turn).
 */
#define FORMAT_F32 0
#define FORMAT_F16 1
#define FORMAT_BF16 2
#define FORMAT_Q4_0 3
#define FORMAT_Q4_1 4
#define FORMAT_Q8_0 5

template <int Format> struct WeightOf {
    const u8* elements;
    const u8* scales;
    i64 row_bytes, scale_bytes;

    __device__ float scale(i64 row, i64 index) const {
        return widen(((const f16*)(scales + row * scale_bytes))[index]);
    }

    __device__ float at(i64 row, i64 column) const {
        const u8* own = elements + row * row_bytes;
        if (Format == FORMAT_F32) return ((const float*)own)[column];
        if (Format == FORMAT_F16) return widen(((const f16*)own)[column]);
        if (Format == FORMAT_BF16) return widen(((const bf16*)own)[column]);
        i64 block = column / 32, item = column % 32;
        if (Format == FORMAT_Q8_0) return scale(row, block) * (float)(signed char)own[column];
        u32 byte = own[block * 16 + item % 16];
        float whole = (float)(item < 16 ? byte & 15 : byte >> 4);
        if (Format == FORMAT_Q4_0) return scale(row, block) * (whole - 8.0f);
        return scale(row, 2 * block) * whole + scale(row, 2 * block + 1);
    }
};

typedef WeightOf<FORMAT> Weight;
#ifdef OTHER_FORMAT
typedef WeightOf<OTHER_FORMAT> OtherWeight;
#endif
