use super::*;
use dsrun_core::BytesReader;
