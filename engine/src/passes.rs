//! Passes: program in, program out.

mod work_lists;

pub use work_lists::size_work_lists;
