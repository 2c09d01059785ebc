//! Loops compiled for several generations of processors.

/// Declares functions that run a body, an `#[inline(always)]` function, compiled for AVX2 on processors that have it. The results
/// are the same: multiplications and additions stay separate operations.
macro_rules! dispatched {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)? = $body:path;)*) => {$(
        $(#[$doc])*
        #[inline]
        fn $name($($argument: $kind),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn fast($($argument: $kind),*) $(-> $result)? {
                    $body($($argument),*)
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has AVX2.
                    return unsafe { fast($($argument),*) };
                }
            }
            $body($($argument),*)
        }
    )*};
}

pub(super) use dispatched;
