/*
 * Operand lists for wgmma (sm_90a), 64 rows by a given number of columns: the instruction lists its accumulator registers `d` one
 * by one, half as many per thread as columns, followed by the other operands. A file defines SUM(x), the type of a sum.
 */
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

#define NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_48 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_64 NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_80 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_96 NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_112 NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_128 NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_192 NAMES_128 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_224 NAMES_192 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_256 NAMES_224 \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i) \
    SUM(d[i]), SUM(d[i + 1]), SUM(d[i + 2]), SUM(d[i + 3]), SUM(d[i + 4]), SUM(d[i + 5]), SUM(d[i + 6]), SUM(d[i + 7])
#define PLACES_32 EIGHT(0), EIGHT(8)
#define PLACES_48 PLACES_32, EIGHT(16)
#define PLACES_64 PLACES_48, EIGHT(24)
#define PLACES_80 PLACES_64, EIGHT(32)
#define PLACES_96 PLACES_80, EIGHT(40)
#define PLACES_112 PLACES_96, EIGHT(48)
#define PLACES_128 PLACES_112, EIGHT(56)
#define PLACES_192 PLACES_128, EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88)
#define PLACES_224 PLACES_192, EIGHT(96), EIGHT(104)
#define PLACES_256 PLACES_224, EIGHT(112), EIGHT(120)
#define BEHIND_32 "%16", "%17", "%18", "%19", "%20"
#define BEHIND_48 "%24", "%25", "%26", "%27", "%28"
#define BEHIND_64 "%32", "%33", "%34", "%35", "%36"
#define BEHIND_80 "%40", "%41", "%42", "%43", "%44"
#define BEHIND_96 "%48", "%49", "%50", "%51", "%52"
#define BEHIND_112 "%56", "%57", "%58", "%59", "%60"
#define BEHIND_128 "%64", "%65", "%66", "%67", "%68"
#define BEHIND_192 "%96", "%97", "%98", "%99", "%100"
#define BEHIND_224 "%112", "%113", "%114", "%115", "%116"
#define BEHIND_256 "%128", "%129", "%130", "%131", "%132"
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)
#define CALL(f, ...) f(__VA_ARGS__)
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
/* The accumulators as a list of names; as operands; and the operands after them, as strings for `f`. */
#define NAMES(columns) "{" JOIN(NAMES_, columns) "}"
#define PLACES(columns) JOIN(PLACES_, columns)
#define BEHIND(columns, f) CALL(f, JOIN(BEHIND_, columns))
/* Both matrices in shared memory, and whether to accumulate; or the first in registers. */
#define DESCRIPTORS(a, b, add, ...) a ", " b
#define FLAG(a, b, add, ...) add
#define FROM_REGISTERS(a, b, c, d, x) "{" a ", " b ", " c ", " d "}, " x
#endif
