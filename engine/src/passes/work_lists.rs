//! Sets the length of a program's attention work lists to the length that the device needs.

use dsrun_core::{
    Result, Size, TensorDesc,
    device::Device,
    kernels::{CallDesc, OperandDesc},
    op::{AttentionPrepare, Op, OperandType},
    program::Program,
};

/// Asks the device for the length of the work list of each `attention_prepare`, at the sizes of a bucket, and sets it in the
/// call and in its result.
///
/// # Errors
/// If a size has no value, or the device refuses the query.
pub fn size_work_lists(
    program: &mut Program,
    device: &dyn Device,
    sizes: &dyn Fn(&str) -> Option<usize>,
) -> Result<()> {
    for index in 0..program.nodes.len() {
        let Op::AttentionPrepare(_) = program.nodes[index].call.op else { continue };
        let mut operands = Vec::new();
        for operand in &program.nodes[index].call.operands {
            let tensor =
                operand.and_then(|id| program.values.get(id.index())).and_then(|value| value.tensor_type());
            let desc = match tensor {
                Some(tensor) => {
                    Some(OperandDesc::Tensor(TensorDesc::dense(tensor.dtype, &tensor.resolve(sizes)?)))
                }
                None => None,
            };
            operands.push(desc);
        }
        let op = Op::from(AttentionPrepare { words: 0 });
        let results = vec![TensorDesc::dense(dsrun_core::DType::I32, &[0])];
        let call = CallDesc { op, operands, results, comm: None }.validate()?;
        let words = device.kernels().query(&call)?.work_words;
        program.nodes[index].call.op = AttentionPrepare { words: words as u32 }.into();
        for result in program.nodes[index].call.results.clone() {
            if let Some(OperandType::Tensor(tensor)) =
                program.values.get_mut(result.index()).map(|value| &mut value.value_type)
            {
                tensor.shape = vec![Size::Static(words)];
            }
        }
    }
    program.validate()
}
