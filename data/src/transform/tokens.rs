//! Transform of a text into the numbers of its tokens.

use std::sync::Arc;

use proto::column::{ColumnSpec, ElementType};

use crate::tokenizer::Tokenizer;

/// The tokens of a text.
#[derive(Clone, Debug)]
pub(super) struct Tokens {
    tokenizer: Arc<Tokenizer>,
    special: bool,
}

impl Tokens {
    /// Returns the transform of such values by the tokenizer in `file`, and what comes of them. The
    /// bytes of a ragged u8 column are a text.
    ///
    /// # Errors
    /// The values are no text, or the file is no tokenizer.
    pub(super) fn new(
        spec: &ColumnSpec,
        file: &str,
        sha256: Option<&str>,
        special: bool,
    ) -> Result<(Self, ColumnSpec), String> {
        if !spec.ragged || spec.dtype != ElementType::U8 || !spec.shape.is_empty() {
            return Err(format!("it takes a text, u8[any], and this is {spec}; name a column of strings"));
        }
        let tokenizer = Tokenizer::open(file, sha256)?;
        Ok((Self { tokenizer, special }, ColumnSpec::ragged(&spec.name, ElementType::I64, [])))
    }

    /// Returns the numbers of one record's tokens.
    ///
    /// # Errors
    /// The bytes are no UTF-8, or the tokenizer has no token for a part of the text.
    pub(super) fn apply(&self, values: &[u8]) -> Result<Vec<u8>, String> {
        let text = std::str::from_utf8(values).map_err(|error| {
            format!(
                "the text is no UTF-8 from byte {} on; mend it, or skip such records",
                error.valid_up_to()
            )
        })?;
        let tokens = self.tokenizer.encode(text, self.special)?;
        Ok(tokens.into_iter().flat_map(|token| i64::from(token).to_le_bytes()).collect())
    }
}

#[cfg(test)]
mod tests {
    use proto::spec::Transform;
    use serde::Deserialize;

    use super::*;
    use crate::transform::{Draws, Pipeline};

    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokens");

    fn text() -> ColumnSpec {
        ColumnSpec::ragged("text", ElementType::U8, [])
    }

    fn pipeline(column: &ColumnSpec, transforms: &str) -> Result<Pipeline, String> {
        let transforms: Vec<Transform> = serde_json::from_str(transforms).unwrap();
        Pipeline::new(column, &transforms)
    }

    fn values(pipeline: &Pipeline, text: &[u8]) -> Result<Vec<i64>, String> {
        let bytes = pipeline.values(text, Draws { epoch: 0, record: 0 })?;
        let integers = bytes.as_chunks().0.iter();
        Ok(integers.map(|bytes| i64::from_le_bytes(*bytes)).collect())
    }

    #[test]
    fn tokens_are_those_of_the_python_package() {
        #[derive(Deserialize)]
        struct Case {
            tokenizer: String,
            text: String,
            with: Vec<i64>,
            without: Vec<i64>,
        }
        let cases = std::fs::read_to_string(format!("{FOLDER}/cases.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&cases).unwrap();
        assert!(cases.len() > 20);
        for Case { tokenizer, text: given, with, without } in cases {
            for (special, expected) in [(true, &with), (false, &without)] {
                let list = format!(
                    r#"[{{"op": "tokenize", "file": "{FOLDER}/{tokenizer}.json", "add_special_tokens": {special}}}]"#
                );
                let pipeline = pipeline(&text(), &list).unwrap();
                assert_eq!(pipeline.spec().to_string(), "`text` i64[any]");
                assert_eq!(&values(&pipeline, given.as_bytes()).unwrap(), expected, "{tokenizer}: {given}");
            }
            let padded = format!(
                r#"[{{"op": "tokenize", "file": "{FOLDER}/{tokenizer}.json"}}, {{"op": "pad", "length": 6, "value": -1}},
                   {{"op": "cast", "dtype": "i32"}}]"#
            );
            let pipeline = pipeline(&text(), &padded).unwrap();
            assert_eq!(pipeline.spec().to_string(), "`text` i32[6]");
            let mut out = vec![0; pipeline.bytes()];
            pipeline.apply(given.as_bytes(), Draws { epoch: 0, record: 0 }, &mut out).unwrap();
            let found = out.as_chunks().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes)));
            let expected = with.iter().copied().chain(std::iter::repeat(-1)).take(6);
            assert!(found.eq(expected), "{tokenizer}: {given}");
        }
    }

    #[test]
    fn what_is_no_tokenizer_or_no_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let list = format!(r#"[{{"op": "tokenize", "file": "{}"}}]"#, path.display());
        let error = |column: &ColumnSpec| pipeline(column, &list).unwrap_err();
        let message = error(&text());
        assert!(message.contains("0, `tokenize`: ") && message.contains("t.json: No such file"), "{message}");
        std::fs::write(&path, "{\"version\": \"1.0\"}").unwrap();
        let message = error(&text());
        assert!(
            message.contains("t.json: no tokenizer.json (") && message.contains("tokenizer.save"),
            "{message}"
        );
        let numbers = ColumnSpec::ragged("x", ElementType::I32, []);
        let message = error(&numbers);
        assert!(message.contains("it takes a text, u8[any], and this is `x` i32[any]"), "{message}");
        let image = format!(r#"[{{"op": "decode"}}, {}"#, &list[1..]);
        assert!(pipeline(&text(), &image).unwrap_err().contains("this is an image"));

        let bpe = std::fs::read_to_string(format!("{FOLDER}/bpe.json")).unwrap();
        let mut random: serde_json::Value = serde_json::from_str(&bpe).unwrap();
        random["model"]["dropout"] = 0.5.into();
        std::fs::write(&path, random.to_string()).unwrap();
        let message = error(&text());
        assert!(message.contains("model.dropout = 0.5 draws tokens at random"), "{message}");

        let wordpiece = std::fs::read_to_string(format!("{FOLDER}/wordpiece.json")).unwrap();
        let changed = |key: &str, value: serde_json::Value| {
            let mut file: serde_json::Value = serde_json::from_str(&wordpiece).unwrap();
            file[key] = value;
            std::fs::write(&path, file.to_string()).unwrap();
            error(&text())
        };
        let cut = |max_length: usize, stride: usize| {
            serde_json::json!({
                "direction": "Right", "max_length": max_length, "strategy": "LongestFirst", "stride": stride
            })
        };
        // The file adds two special tokens.
        for (max_length, stride) in [(1, 0), (3, 1), (8, 7)] {
            let message = changed("truncation", cut(max_length, stride));
            let expected = format!(
                "truncation: max_length = {max_length} has no room for 2 special tokens and a stride of {stride}; \
                 raise max_length, or set stride to 0"
            );
            assert!(message.contains(&expected), "{message}");
        }
        let padding = serde_json::json!({
            "strategy": { "Fixed": 1u64 << 40 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "[PAD]"
        });
        let message = changed("padding", padding);
        assert!(
            message.contains("padding: it fills texts up to 1099511627776 tokens, at most 1048576"),
            "{message}"
        );

        std::fs::write(&path, bpe).unwrap();
        let other = "0".repeat(64);
        let hashed = list.replace("}]", &format!(r#", "sha256": "{other}"}}]"#));
        let message = pipeline(&text(), &hashed).unwrap_err();
        assert!(message.contains(&format!("and was {other} when the job was submitted")), "{message}");
        let pipeline = pipeline(&text(), &list).unwrap();
        let message = values(&pipeline, b"red \xFF").unwrap_err();
        assert!(message.contains("the text is no UTF-8 from byte 4 on"), "{message}");
    }

    #[test]
    fn a_tokenizer_is_known_by_the_hash_of_its_file() {
        let content = std::fs::read(format!("{FOLDER}/wordpiece.json")).unwrap();
        let first = Tokenizer::read(&content).unwrap();
        let hash = proto::artifact::sha256_hex(&content);
        assert!(Arc::ptr_eq(&first, &Tokenizer::known(&hash).unwrap()));
        // The file itself may be elsewhere, as on a worker.
        let found = Tokenizer::open("/nonexistent/tokenizer.json", Some(&hash)).unwrap();
        assert!(Arc::ptr_eq(&first, &found));
        assert!(Tokenizer::known(&"0".repeat(64)).is_none());
    }
}
