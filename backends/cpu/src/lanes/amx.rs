//! Intel AMX: a unit that multiplies tiles of bytes, beside AVX-512.
//!
//! A tile is a register of up to sixteen rows of 64 bytes. The standard library has no stable functions for tiles, so the few
//! instructions are assembly here.

use super::x86::Avx512;
use std::{
    arch::{asm, x86_64::__cpuid_count},
    marker::PhantomData,
    sync::OnceLock,
};

/// Rows of activations of a tile.
pub(crate) const ROWS: usize = 16;

/// Words of four bytes of a row of a tile.
pub(crate) const WORDS: usize = 16;

/// AMX for bytes, with all of [`Avx512`] and its multiplication of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(Avx512<true>);

impl Amx {
    /// Proof that this processor has the instructions and the system lets the process use them, if so.
    pub(crate) fn detect() -> Option<Self> {
        static FOUND: OnceLock<Option<Amx>> = OnceLock::new();
        *FOUND.get_or_init(|| Avx512::detect().filter(|_| has_tiles() && is_permitted()).map(Self))
    }

    /// The set without tiles.
    pub(crate) fn lanes(self) -> Avx512<true> {
        self.0
    }

    /// Runs `work` with tiles on this thread.
    pub(crate) fn with_tiles<T>(self, work: impl FnOnce(Tiles) -> T) -> T {
        /// What `ldtilecfg` reads.
        #[repr(C, align(64))]
        struct Configuration {
            palette: u8,
            start: u8,
            reserved: [u8; 14],
            bytes: [u16; 16],
            rows: [u8; 16],
        }
        // Eight full tiles.
        let (mut bytes, mut rows) = ([0; 16], [0; 16]);
        bytes[..8].fill(4 * WORDS as u16);
        rows[..8].fill(ROWS as u8);
        let configuration = Configuration { palette: 1, start: 0, reserved: [0; 14], bytes, rows };
        // SAFETY: `self` exists, so the processor has tiles and the process may use them; the configuration is valid, and no tile
        // is in use on this thread.
        unsafe {
            asm!(
                "ldtilecfg [{}]", in(reg) &raw const configuration,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags),
            );
        }
        let released = Release;
        let result = work(Tiles(PhantomData));
        drop(released);
        result
    }
}

/// Gives the tiles back, so that the system need not save them when it changes threads.
struct Release;

impl Drop for Release {
    fn drop(&mut self) {
        // SAFETY: tiles were configured on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// The configured tiles of this thread, which they do not leave.
pub(crate) struct Tiles(PhantomData<*const ()>);

/// Sums of sixteen rows of activations and sixteen rows of weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Sums(pub(crate) [[i32; 16]; ROWS]);

impl Tiles {
    /// `sums[r][lane] = sum_w x[r][w] . weights[w][lane]`, products of four signed bytes and four unsigned ones. `weights` fills one
    /// tile or several, and so does `x`: [`WORDS`] words of each row, row after row. Sums wrap around.
    #[inline(always)]
    pub(crate) fn dot(&self, x: &[u32], weights: &[[u32; 16]], sums: &mut Sums) {
        let count = weights.len() / WORDS;
        assert!(count > 0 && weights.len() == count * WORDS, "weights fill whole tiles");
        assert!(x.len() == ROWS * weights.len(), "activations are as long as the weights");
        // SAFETY: tiles are configured on this thread, because `self` exists and is not `Send`; `count` times they read `ROWS * WORDS`
        // words of `x`, and as many of `weights`, which both have by the assertions, and write `sums`.
        unsafe {
            asm!(
                "tilezero tmm0",
                "2:",
                "tileloadd tmm1, [{x} + {row} * 1]",
                "tileloadd tmm2, [{weights} + {row} * 1]",
                "tdpbsud tmm0, tmm1, tmm2",
                "add {x}, {tile}",
                "add {weights}, {tile}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{sums} + {row} * 1], tmm0",
                x = inout(reg) x.as_ptr() => _,
                weights = inout(reg) weights.as_ptr() => _,
                count = inout(reg) count => _,
                row = in(reg) 4 * WORDS,
                tile = in(reg) 4 * WORDS * ROWS,
                sums = in(reg) &raw mut *sums,
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                options(nostack),
            );
        }
    }
}

/// Whether the processor has tiles and multiplies bytes with them, and the system saves them.
fn has_tiles() -> bool {
    const TILES: u32 = 1 << 24;
    const BYTES: u32 = 1 << 25;
    /// Configuration and data of tiles.
    const STATE: u32 = 3 << 17;
    // The leaf exists on every processor with AVX-512, which was detected before, and so does `xgetbv`.
    let leaf = __cpuid_count(7, 0);
    let enabled: u32;
    // SAFETY: see above.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nostack, nomem)) };
    leaf.edx & (TILES | BYTES) == TILES | BYTES && enabled & STATE == STATE
}

/// Asks the system for the memory that tiles take when it changes threads. Linux gives it to a process that asks.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const DATA_OF_TILES: usize = 18;
    let status: isize;
    // SAFETY: the call changes nothing but the permission, and reads no memory; an older system answers with an error.
    unsafe {
        asm!(
            "syscall",
            inout("rax") ARCH_PRCTL => status,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") DATA_OF_TILES,
            out("rcx") _, out("r11") _,
            options(nostack),
        );
    }
    status == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs a processor with AMX: cargo test -p dsrun-cpu --lib -- --ignored tiles_multiply"]
    fn tiles_multiply_signed_with_unsigned_bytes() {
        let amx =
            Amx::detect().expect("this processor has no AMX, or the system does not let processes use it");
        let word = |at: usize, factor: usize| {
            u32::from_le_bytes(std::array::from_fn(|byte| ((4 * at + byte) * factor % 256) as u8))
        };
        for tiles in [1, 3] {
            let x: Vec<u32> = (0..tiles * ROWS * WORDS).map(|index| word(index, 89)).collect();
            let weights: Vec<[u32; 16]> =
                (0..tiles * WORDS).map(|row| std::array::from_fn(|lane| word(16 * row + lane, 57))).collect();
            let mut sums = Sums([[7; 16]; ROWS]);
            amx.with_tiles(|registers| registers.dot(&x, &weights, &mut sums));
            for (row, sums) in sums.0.iter().enumerate() {
                for (lane, sum) in sums.iter().enumerate() {
                    let product = |at: usize| {
                        let x = x[(at / WORDS * ROWS + row) * WORDS + at % WORDS].to_le_bytes();
                        let pairs = x.into_iter().zip(weights[at][lane].to_le_bytes());
                        pairs.map(|(x, weight)| i32::from(x as i8) * i32::from(weight)).sum::<i32>()
                    };
                    assert_eq!(*sum, (0..tiles * WORDS).map(product).sum::<i32>(), "{tiles}, {row}, {lane}");
                }
            }
        }
    }
}
