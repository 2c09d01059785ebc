//! Writes small GGUF files and remembers where every number of the header is.

/// A number of the header.
#[allow(dead_code, reason = "not every test program looks at the fields")]
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) label: String,
    pub(crate) offset: usize,
    pub(crate) width: usize,
}

/// A file as it is being written: metadata first, then tensors, then [`Self::finish`].
pub(crate) struct Writer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fields: Vec<Field>,
    alignment: usize,
    keys: u64,
    tensors: u64,
    data: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(version: u32) -> Self {
        let mut writer = Self {
            bytes: b"GGUF".to_vec(),
            fields: vec![],
            alignment: 32,
            keys: 0,
            tensors: 0,
            data: vec![],
        };
        writer.u32("version", version);
        writer.u64("tensor count", 0);
        writer.u64("key count", 0);
        writer
    }

    pub(crate) fn number(&mut self, label: impl Into<String>, bytes: &[u8]) {
        self.fields.push(Field { label: label.into(), offset: self.bytes.len(), width: bytes.len() });
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn u32(&mut self, label: impl Into<String>, value: u32) {
        self.number(label, &value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, label: impl Into<String>, value: u64) {
        self.number(label, &value.to_le_bytes());
    }

    pub(crate) fn text(&mut self, label: &str, text: &[u8]) {
        self.u64(format!("length of {label}"), text.len() as u64);
        self.bytes.extend_from_slice(text);
    }

    /// Starts a metadata entry; the value follows.
    pub(crate) fn key(&mut self, key: &str, value_type: u32) -> &mut Self {
        self.keys += 1;
        self.text(&format!("key {key}"), key.as_bytes());
        self.u32(format!("type of {key}"), value_type);
        self
    }

    pub(crate) fn string(&mut self, key: &str, value: &str) -> &mut Self {
        self.key(key, 8).text(&format!("value of {key}"), value.as_bytes());
        self
    }

    /// A number of any type; `general.alignment` also sets how the data is laid out.
    pub(crate) fn scalar(&mut self, key: &str, value_type: u32, value: &[u8]) -> &mut Self {
        self.key(key, value_type).number(format!("value of {key}"), value);
        if let ("general.alignment", Ok(value)) = (key, <[u8; 4]>::try_from(value)) {
            self.alignment = u32::from_le_bytes(value) as usize;
        }
        self
    }

    /// Starts an array; the elements follow.
    pub(crate) fn array(&mut self, key: &str, element_type: u32, count: u64) -> &mut Self {
        self.key(key, 9);
        self.u32(format!("element type of {key}"), element_type);
        self.u64(format!("length of array {key}"), count);
        self
    }

    pub(crate) fn strings(&mut self, key: &str, values: &[&str]) -> &mut Self {
        self.array(key, 8, values.len() as u64);
        for (index, value) in values.iter().enumerate() {
            self.text(&format!("element {index} of {key}"), value.as_bytes());
        }
        self
    }

    /// A tensor whose data follows that of the one before; `shape` is innermost first, as in the file.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[u64], tensor_type: u32, data: &[u8]) -> &mut Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend_from_slice(data);
        self.tensor_at(name, shape, tensor_type, offset)
    }

    /// A tensor at an offset, without data of its own.
    pub(crate) fn tensor_at(
        &mut self,
        name: &str,
        shape: &[u64],
        tensor_type: u32,
        offset: u64,
    ) -> &mut Self {
        self.tensors += 1;
        self.text(&format!("tensor {name}"), name.as_bytes());
        self.u32(format!("rank of {name}"), shape.len() as u32);
        for (index, size) in shape.iter().enumerate() {
            self.u64(format!("dimension {index} of {name}"), *size);
        }
        self.u32(format!("type of tensor {name}"), tensor_type);
        self.u64(format!("offset of {name}"), offset);
        self
    }

    /// Fills in the counts and adds the data.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        self.bytes[8..16].copy_from_slice(&self.tensors.to_le_bytes());
        self.bytes[16..24].copy_from_slice(&self.keys.to_le_bytes());
        let mut file = self.bytes.clone();
        file.resize(file.len().next_multiple_of(self.alignment.max(1)), 0);
        file.extend_from_slice(&self.data);
        file
    }
}

/// A file with every kind of metadata value, a vocabulary, and a tensor of every type that can be used.
pub(crate) fn sample() -> Writer {
    let mut writer = Writer::new(3);
    writer
        .string("general.architecture", "llama")
        .scalar("general.alignment", 4, &64u32.to_le_bytes())
        .scalar("test.u8", 0, &[200])
        .scalar("test.i8", 1, &[0xFE])
        .scalar("test.u16", 2, &40_000u16.to_le_bytes())
        .scalar("test.i16", 3, &(-3i16).to_le_bytes())
        .scalar("test.u32", 4, &4_000_000_000u32.to_le_bytes())
        .scalar("test.i32", 5, &(-4i32).to_le_bytes())
        .scalar("test.f32", 6, &1e-5f32.to_le_bytes())
        .scalar("test.bool", 7, &[1])
        .scalar("test.u64", 10, &u64::MAX.to_le_bytes())
        .scalar("test.i64", 11, &i64::MIN.to_le_bytes())
        .scalar("test.f64", 12, &0.25f64.to_le_bytes())
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &["<s>", "a", "b", "ab", "é"])
        .strings("tokenizer.ggml.merges", &["a b"])
        .scalar("tokenizer.ggml.bos_token_id", 4, &0u32.to_le_bytes())
        .scalar("tokenizer.ggml.add_bos_token", 7, &[0])
        .string("tokenizer.chat_template", "{{ messages }}");
    writer
        .array("tokenizer.ggml.token_type", 5, 5)
        .bytes
        .extend([3i32, 1, 1, 1, 1].map(i32::to_le_bytes).concat());
    writer.array("test.floats", 6, 2).bytes.extend([0.5f32, -1.5].map(f32::to_le_bytes).concat());
    writer.array("test.bools", 7, 3).bytes.extend([1, 0, 1]);
    writer.array("test.empty", 8, 0);

    let f32s: Vec<u8> = (0..6).flat_map(|i| (i as f32 * 0.5).to_le_bytes()).collect();
    let halves = [0x3C00u16, 0xC000, 0x7BFF].map(u16::to_le_bytes).concat();
    let blocks = |bytes: usize| -> Vec<u8> {
        let block = |index: usize| {
            let mut block: Vec<u8> = (0..bytes).map(|i| (i * 37 + index * 11) as u8).collect();
            block[..2].copy_from_slice(&0x3800u16.to_le_bytes());
            if bytes == 20 {
                block[2..4].copy_from_slice(&0xB800u16.to_le_bytes());
            }
            block
        };
        (0..4).flat_map(block).collect()
    };
    writer
        .tensor("f32", &[3, 2], 0, &f32s)
        .tensor("f16", &[3], 1, &halves)
        .tensor("bf16", &[1, 3], 30, &halves)
        .tensor("q4_0", &[64, 2], 2, &blocks(18))
        .tensor("q4_1", &[32, 2, 2], 3, &blocks(20))
        .tensor("q8_0", &[32, 1, 2, 2], 8, &blocks(34))
        .tensor("future", &[5], 1000, &[1; 5])
        .tensor("q8_k", &[256], 15, &[7; 292]);
    writer
}
