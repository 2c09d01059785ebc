/*
 * dsrun.h: the C ABI of dsrun, for authors of backends.
 *
 * Generated from dsrun-plugin-sdk by `cargo xtask header`. Do not edit.
 *
 * A backend is a dynamic library that exports one function, dsrun_plugin_entry_v0, through which host and plugin exchange
 * function tables. These rules hold for all functions:
 *
 * Errors     A function that can fail returns a dsr_status: NULL is success. The host makes errors (dsr_host_api.status_new) and
 *            frees them; a plugin returns them and keeps none. The last parameters of a function are its outputs; they are
 *            never NULL, and untouched after an error.
 * Ownership  The host owns what a plugin makes, and frees it exactly once, children before their parents. The target of a
 *            pointer parameter belongs to the caller and is valid until the function returns, unless its comment says
 *            otherwise. dsr_host_api.text_set copies the texts that a plugin sets.
 * Sizes      A struct that begins with struct_size may grow at its end in later versions. The writer of a struct sets the size
 *            it was compiled with. The reader of a struct, or the writer of one that the other side has allocated, accesses no
 *            field beyond that size; see DSR_HAS. A missing field means the same as 0. Arrays hold structs whose size never
 *            changes.
 * Threads    Any thread may call the functions of a plugin and of a device at any time. A stream, a bound call and a graph are
 *            used by one thread at a time, and may move between threads. No result may depend on the calling thread. A plugin
 *            calls the host while it holds a lock of its own only for log, text_set and status_*.
 * Unwinding  No panic, exception or longjmp leaves a function. A function that would unwind returns DSR_CODE_PANIC, after which
 *            the host stops using the object. dsrun.hpp does this for C++.
 * Tensors    Row-major, with a stride for each dimension; the last dimension is contiguous. The memory between rows is not part
 *            of the tensor. An extent is an i32 that is read when the call runs; only that many first rows are valid, and others
 *            are neither read nor written. More rows than there are means all, a negative number none. Where tensors of a call
 *            share their rows, those below all of their extents are valid. An index of -1 means skip; an index out of range is
 *            treated as -1. Sizes may be 0. Results share no memory with operands, except those they update. What operands and
 *            extents hold is read when a call runs, never when it is bound.
 * Numbers    Sums are made in f32 or wider, in any order, one running sum included. A result is rounded once, to nearest or by
 *            truncation; a region may omit inner roundings. With u the unit roundoff of a result's type and m the sum of the
 *            absolute values of its terms, a result y may be off by 2 u |y| + 2^-21 m max(1, sqrt(terms) / 4), and by 2^-20 |y|
 *            more where it is in proportion to an exponential, sine or logarithm. Copies and integers are exact. Subnormal
 *            numbers are kept in operands and results, except those of types in dsr_device_properties.flushed_operands and
 *            flushed_results. What is computed on the way may be flushed below the smallest normal f32, but not in copies, casts
 *            and additions. Infinities are infinities of the same sign; for NaN see DSR_DEVICE_STRICT_NAN.
 * Process    A plugin does not end the process, install signal handlers, write to standard output, or change the environment, the
 *            working directory or how the calling thread rounds and treats subnormal numbers. It is never unloaded.
 * Checks     The host validates all descriptions and arguments before it calls a plugin. A plugin that other callers may use
 *            validates them with one call each: dsr_host_api.validate_call and validate_arguments.
 * Version    While DSR_ABI_MAJOR is 0, host and plugin must have the same DSR_ABI_MINOR. A plugin that finds a host of another
 *            version sets its table and calls nothing; the host sees the version and reports it. Numbers are never reused.
 */

#ifndef DSRUN_H
#define DSRUN_H

#include <stddef.h>
#include <stdint.h>

