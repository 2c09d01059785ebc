//! Presets and random weights.

use super::fixtures;
use dsrun_core::{
    BlockFormat, DType, WeightFormat,
    program::{Origin, Program},
};
use dsrun_models::{
    model::{Model, ModelError},
    presets::Preset,
    step::ProgramOptions,
    weights::ExprReader,
};

const BF16: WeightFormat = WeightFormat::Dense(DType::BF16);

/// The elements of all tensors that a program reads.
fn parameters(model: &Model, program: &Program) -> u64 {
    let mut tensors: Vec<&str> = Vec::new();
    for (_, value) in program.values_from(|_| true) {
        if let Origin::Weight(expr) = &value.origin {
            tensors.extend(expr.tensors());
        }
    }
    let size = |name: &&str| model.weights().tensor_type(name).unwrap().elements().unwrap() as u64;
    tensors.iter().map(size).sum()
}

/// As the hub shows them for the published files. For Gemma 3 that is 419,816,304 more, for the part that sees images.
const PUBLISHED: [(&str, u64); 29] = [
    ("smollm2-135m", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("smollm2-1.7b", 1_711_376_384),
    ("llama-1b", 1_235_814_400),
    ("llama-3b", 3_212_749_824),
    ("llama-8b", 8_030_261_248),
    ("llama-70b", 70_553_706_496),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264),
    ("gemma-3-4b", 4_300_079_472 - 419_816_304),
    ("phi-4-mini", 3_836_021_760),
    ("smollm3-3b", 3_075_098_624),
    ("mistral-7b", 7_248_023_552),
    ("gpt2", 124_439_808),
    ("gpt2-xl", 1_557_611_200),
    ("opt-125m", 125_239_296),
    ("opt-1.3b", 1_315_758_080),
    ("opt-13b", 12_853_473_280),
    ("mixtral-8x7b", 46_702_792_704),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("olmoe-1b-7b", 6_919_161_856),
    ("gpt-oss-20b", 20_914_757_184),
    ("deepseek-v2-lite", 15_706_484_224),
    ("deepseek-v3", 671_026_419_200),
    ("phi-3.5-moe", 41_873_153_344),
];

#[test]
fn presets_have_as_many_parameters_as_published() {
    let names: Vec<&str> = Preset::ALL.iter().map(|preset| preset.name).collect();
    assert_eq!(names, PUBLISHED.map(|(name, _)| name));
    for (name, published) in PUBLISHED {
        let model = Model::random_named(name, 1, BF16).unwrap();
        let program = model.program(&ProgramOptions::default()).unwrap();
        // Published files of OPT have two vectors more than there are positions.
        let unused = if name.starts_with("opt") { 2 * model.config().hidden as u64 } else { 0 };
        assert_eq!(parameters(&model, &program) + unused, published, "{name}");
    }
}

#[test]
fn random_weights_follow_the_seed_and_the_format() {
    let config = || Preset::from_name("smollm2-135m").unwrap().config().unwrap();
    let rows = |seed, format| {
        let model = Model::random("test", config(), seed, format).unwrap();
        let program = model.program(&ProgramOptions::default()).unwrap();
        let (_, query) =
            program.values_from(|_| true).find(|(_, value)| value.name == "layers.3.query").unwrap();
        assert_eq!(query.weight_type().unwrap().format, format);
        let Origin::Weight(expr) = &query.origin else { panic!("no weight") };
        ExprReader::new(&**model.weights(), expr).unwrap().decoded_rows(0, 4).unwrap()
    };
    let first = rows(1, BF16);
    assert_eq!(first, rows(1, BF16));
    assert_ne!(first, rows(2, BF16));
    rows(1, WeightFormat::Block(BlockFormat::Q4_0));
}

#[test]
fn random_models_come_from_configuration_files_too() {
    for path in [fixtures::folder("qwen2"), fixtures::folder("qwen2").join("config.json")] {
        assert_eq!(Model::random_named(path.to_str().unwrap(), 3, BF16).unwrap().config().vocabulary, 96);
    }
    let error = Model::random_named("smollm3", 3, BF16).unwrap_err();
    assert!(matches!(error, ModelError::UnknownPreset { .. }) && error.to_string().contains("smollm2-135m"));
}
