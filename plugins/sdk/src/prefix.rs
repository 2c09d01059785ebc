//! Reading and writing memory of the other side of the ABI.
//!
//! Structs that may grow begin with their size. The reader copies the prefix that both sides know into a zeroed struct, so the
//! missing fields of a shorter struct are zero and the additional fields of a longer one are ignored.

use super::raw::*;
use dsrun_core::{Error, Result};
use std::{borrow::Cow, mem::MaybeUninit, ptr, slice};

/// A struct of the C ABI that begins with its size.
///
/// # Safety
/// `repr(C)`; the first field is `struct_size: u32`; every field is valid when all its bytes are zero.
pub(crate) unsafe trait Prefixed: Copy {
    /// The name in C.
    const NAME: &'static str;
}

macro_rules! prefixed {
    ($($name:ident,)*) => {$(
        // SAFETY: declared in `raw` with `struct_size` first, and of numbers, pointers, optional functions and structs of them.
        unsafe impl Prefixed for $name {
            const NAME: &'static str = stringify!($name);
        }
    )*};
}

prefixed! {
    dsr_error, dsr_device_info, dsr_device_options, dsr_device_properties, dsr_memory_use, dsr_region, dsr_transport,
    dsr_call_desc, dsr_support, dsr_weight_desc, dsr_packed_layout, dsr_row_reader, dsr_arguments, dsr_bind_limits,
    dsr_host_api, dsr_plugin_api, dsr_memory_api, dsr_stream_api, dsr_event_api, dsr_op_api, dsr_graph_api, dsr_comm_api,
    dsr_finding, dsr_diagnose_api, dsr_prepare_api,
}

/// The size of the shortest struct that begins with its size, in any version.
pub(crate) const MIN_SIZE: usize = 8;

/// A struct of zero bytes, except for its size.
pub(crate) fn zeroed<T: Prefixed>() -> T {
    // SAFETY: `Prefixed` says that zero is valid and that the first field is a u32.
    unsafe {
        let mut value = MaybeUninit::<T>::zeroed();
        value.as_mut_ptr().cast::<u32>().write(size_of::<T>() as u32);
        value.assume_init()
    }
}

/// Copies the prefix that both sides know into a zeroed struct; `struct_size` becomes the length of that prefix.
///
/// # Errors
/// If the pointer is null, or the stated size is too small for any struct.
///
/// # Safety
/// A pointer that is not null is readable for four bytes, and for as many as those say.
pub(crate) unsafe fn read<T: Prefixed>(pointer: *const T) -> Result<T> {
    if pointer.is_null() {
        return Err(Error::invalid("is null").at(T::NAME));
    }
    // SAFETY: the caller says that four bytes can be read.
    let stated = unsafe { pointer.cast::<u32>().read_unaligned() } as usize;
    if stated < MIN_SIZE {
        let message = format!("is {stated}, must be at least {MIN_SIZE}");
        return Err(Error::invalid(message).at(T::NAME).field("struct_size"));
    }
    let known = stated.min(size_of::<T>());
    let mut value = MaybeUninit::new(zeroed::<T>());
    // SAFETY: the caller says that `stated` bytes can be read, `value` has `size_of::<T>()`, and `known` is at most both. Every
    // field stays valid: it is copied from the same field, or from its front and padded with zeros.
    unsafe {
        ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known);
        value.as_mut_ptr().cast::<u32>().write(known as u32);
        Ok(value.assume_init())
    }
}

/// Copies a struct, except its size, into one of the other side that may be shorter or longer.
///
/// # Safety
/// `read` of the same pointer succeeded, and it is writable for as many bytes.
pub(crate) unsafe fn write<T: Prefixed>(pointer: *mut T, value: &T) {
    const SIZE: usize = size_of::<u32>();
    // SAFETY: the caller says that `read` succeeded, so the pointer is readable for four bytes and writable for `stated`.
    unsafe {
        let stated = pointer.cast::<u32>().read_unaligned() as usize;
        let known = stated.min(size_of::<T>());
        let (from, to) = (ptr::from_ref(value).cast::<u8>(), pointer.cast::<u8>());
        ptr::copy_nonoverlapping(from.add(SIZE), to.add(SIZE), known.saturating_sub(SIZE));
    }
}

/// The elements of an array of the other side. Null is allowed if `count` is 0.
///
/// # Errors
/// If the array is not empty and null or misaligned, or longer than `most`.
///
/// # Safety
/// A pointer that is not null is readable for `count` elements, which do not change during `'a`.
pub(crate) unsafe fn array<'a, T: Copy>(
    pointer: *const T,
    count: usize,
    most: usize,
    name: &str,
) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > most {
        return Err(Error::invalid(format!("has {count} elements, at most {most}")).at(name));
    }
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid("is null or misaligned").at(name));
    }
    // SAFETY: not null, aligned, and `count`, which is small, elements long as the caller says.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// Bytes of the other side.
///
/// # Errors
/// If the length is not 0 and the pointer is null, or the length exceeds the address space.
///
/// # Safety
/// As [`array`].
pub(crate) unsafe fn bytes<'a>(pointer: *const u8, length: usize, name: &str) -> Result<&'a [u8]> {
    // SAFETY: the caller's obligations are the same.
    unsafe { array(pointer, length, isize::MAX as usize, name) }
}

/// Writable bytes of the other side.
///
/// # Errors
/// As [`bytes`].
///
/// # Safety
/// A pointer that is not null is readable and writable for `length` bytes, which nothing else uses during `'a`.
pub(crate) unsafe fn bytes_mut<'a>(pointer: *mut u8, length: usize, name: &str) -> Result<&'a mut [u8]> {
    if length == 0 {
        return Ok(&mut []);
    }
    if pointer.is_null() || length > isize::MAX as usize {
        return Err(Error::invalid("is null or too long").at(name));
    }
    // SAFETY: not null, bytes are always aligned, and as long as the caller says.
    Ok(unsafe { slice::from_raw_parts_mut(pointer, length) })
}

/// A text of the other side. Invalid UTF-8 is replaced.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn text<'a>(value: dsr_str) -> Cow<'a, str> {
    // SAFETY: the caller's obligations are the same.
    match unsafe { bytes(value.data.cast(), value.length, "text") } {
        Ok(bytes) => String::from_utf8_lossy(bytes),
        Err(_) => Cow::Borrowed(""),
    }
}

/// A text for the other side, valid as long as `value` lives.
pub(crate) const fn str_of(value: &str) -> dsr_str {
    dsr_str { data: value.as_ptr().cast(), length: value.len() }
}

/// Writes an output parameter.
///
/// # Errors
/// If it is null.
///
/// # Safety
/// A pointer that is not null is writable.
pub(crate) unsafe fn put<T>(pointer: *mut T, name: &str, value: T) -> Result<()> {
    check_out(pointer, name)?;
    // SAFETY: not null, aligned, and writable as the caller says.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Checks an output parameter before an object is made that could not be returned.
///
/// # Errors
/// If it is null or misaligned.
pub(crate) fn check_out<T>(pointer: *mut T, name: &str) -> Result<()> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Error::invalid("is null or misaligned").at(name));
    }
    Ok(())
}

/// Converts a size of the other side.
///
/// # Errors
/// If it exceeds the address space.
pub(crate) fn size(value: u64, name: &str) -> Result<usize> {
    usize::try_from(value)
        .map_err(|_| Error::invalid(format!("is {value}, which exceeds the address space")).at(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Longer {
        known: dsr_memory_use,
        more: [u64; 4],
    }

    #[test]
    fn short_structs_read_as_zeros_and_long_ones_as_their_front() {
        let mut longer =
            Longer { known: dsr_memory_use { used: 7, free: 9, ..zeroed() }, more: [u64::MAX; 4] };
        for (stated, used, free) in [(8, 0, 0), (16, 7, 0), (20, 7, 9), (24, 7, 9), (56, 7, 9)] {
            longer.known.struct_size = stated;
            // SAFETY: `Longer` has at least the stated bytes.
            let read = unsafe { read(&raw const longer.known) }.unwrap();
            assert_eq!((read.used, read.free), (used, free), "{stated}");
            assert_eq!(read.struct_size, stated.min(24));
        }
    }

    #[test]
    fn sizes_no_struct_has_and_null_are_refused() {
        for stated in [0, 3, 7] {
            let short = dsr_memory_use { struct_size: stated, ..zeroed() };
            // SAFETY: a whole struct.
            let error = unsafe { read(&raw const short) }.unwrap_err();
            assert_eq!((error.argument(), error.field_name()), (Some("dsr_memory_use"), Some("struct_size")));
        }
        // SAFETY: null is allowed.
        let error = unsafe { read::<dsr_memory_use>(ptr::null()) }.unwrap_err();
        assert!(error.message().contains("null"), "{error}");
    }

    #[test]
    fn writing_stays_within_the_size_stated() {
        let value = dsr_memory_use { used: 7, free: 9, ..zeroed() };
        let mut target = Longer { known: zeroed(), more: [5; 4] };
        for (stated, used, free) in [(8, 0, 0), (16, 7, 0), (56, 7, 9)] {
            target.known = dsr_memory_use { struct_size: stated, ..zeroed() };
            // SAFETY: `Longer` has at least the stated bytes.
            unsafe { write(&raw mut target.known, &value) };
            assert_eq!((target.known.used, target.known.free), (used, free));
            assert_eq!((target.known.struct_size, target.more), (stated, [5; 4]));
        }
    }

    #[test]
    fn arrays_and_texts_that_cannot_be_are_refused() {
        let words = [1u32, 2];
        let misaligned = words.as_ptr().cast::<u8>().wrapping_add(1).cast::<u32>();
        // SAFETY: lengths are within `words` unless the pointer is refused.
        unsafe {
            assert_eq!(array(words.as_ptr(), 2, 2, "words").unwrap(), [1, 2]);
            assert!(array::<u32>(ptr::null(), 0, 2, "words").unwrap().is_empty());
            assert!(array::<u32>(ptr::null(), 1, 2, "words").is_err());
            assert!(array(words.as_ptr(), 3, 2, "words").is_err());
            assert!(array(misaligned, 1, 2, "words").is_err());
            assert_eq!(text(str_of("wait")), "wait");
            assert_eq!(text(dsr_str { data: ptr::null(), length: 3 }), "");
        }
    }
}
