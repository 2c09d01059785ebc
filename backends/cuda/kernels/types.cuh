/*
 * Scalar types of the kernels, included before everything else.
 *
 * Half-precision types are structs without arithmetic: values are widened to float when they are read and rounded once when they
 * are written.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef int i32;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
typedef float f32;

/* 16 bytes, the widest load. */
struct alignas(16) Vector { u32 word[4]; };
