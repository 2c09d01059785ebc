/*
 * dsrun.h: the C ABI of dsrun, for those who write backends.
 *
 * Generated from dsrun-core by `cargo xtask header`. Do not edit.
 *
 * A backend is a dynamic library that exports one function, dsrun_plugin_entry_v0. It is given the host's table and gives its
 * own. Rules that hold everywhere:
 *
 * Errors     A function that can fail returns a dsr_status: NULL is success. The host makes errors (dsr_host_api.status_new) and
 *            frees them; a plugin returns them and keeps none. On an error, what the function would have filled in is
 *            untouched. The last parameters of a function are what it fills in; they are never NULL.
 * Ownership  What a plugin makes is owned by the host, which frees it exactly once, children before their parents. What a
 *            parameter points to belongs to the caller and is valid until the function returns, unless its comment says
 *            otherwise. Texts a plugin gives are copied by dsr_host_api.text_set.
 * Sizes      A struct that begins with struct_size may grow at its end in later versions. Whoever fills one in sets the size it
 *            was compiled with; whoever reads or fills in one of somebody else's leaves alone what lies behind that size: see
 *            DSR_HAS. What is missing means what 0 means. Arrays hold structs whose size never changes.
 * Threads    Functions of the plugin and of a device may be called from any thread, at the same time. A stream, a bound call and
 *            a graph are used by one thread at a time, and may move between threads. Nothing may depend on which thread
 *            calls. A plugin calls back into the host under no lock of its own, but for log, text_set and status_*.
 * Unwinding  No panic, exception or longjmp leaves a function. What would is returned as DSR_CODE_PANIC, and the host uses the
 *            object no more: dsrun.hpp does this for C++.
 * Tensors    Row-major, with a stride for each dimension; the last is contiguous. What lies between rows belongs to somebody
 *            else. With an extent, an i32 that is read when the call runs, only the first rows are real: the others are not
 *            read, and not written. An index of -1 means skip, wherever indices stand; one that is out of range is data that
 *            is wrong, and must not lead out of memory. Sizes may be 0. Results share no memory with operands, but for those
 *            they update.
 * Process    A plugin does not end the process, install signal handlers or change the environment. It is never unloaded.
 * Checks     The host checks every description and every argument before a plugin sees it. A plugin that is to be safe with other
 *            callers checks with one call each: dsr_host_api.validate_call and validate_arguments.
 * Version    While DSR_ABI_MAJOR is 0, host and plugin must have the same DSR_ABI_MINOR. A plugin whose host has another version
 *            gives its table and calls nothing: the host will see the version and say so. Numbers are never used again.
 */

#ifndef DSRUN_H
#define DSRUN_H

#include <stddef.h>
#include <stdint.h>

