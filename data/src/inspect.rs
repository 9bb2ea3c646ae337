//! A look at one file: its columns, and its first records as text.

use std::path::Path;

use proto::column::{ColumnSpec, ElementType};
use proto::spec::{DataSpec, Format, data_url};

use crate::column::{Column, Fault, each_f64};
use crate::error::{Result, malformed};
use crate::folder::Folder;
use crate::format::Source;
use crate::formats;
use crate::object::Object;
use crate::packed::Access;
use crate::preview::{is_bytes, text};
use crate::{pixels, sample};

/// Values of one record that are shown.
const VALUES_SHOWN: usize = 8;

/// Characters of a text that are shown.
const CHARACTERS_SHOWN: usize = 60;

/// Records whose images are looked at.
const IMAGES_SAMPLED: usize = 256;

/// Most blocks that are decoded to look at images. In a folder of images each image is a block.
const BLOCKS_SAMPLED: usize = 8;

/// What a file has.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspected {
    /// Number of records.
    pub records: u64,
    /// Number of blocks: parts that are decoded at once.
    pub blocks: usize,
    /// Columns, in the order of the file.
    pub columns: Vec<ColumnSpec>,
    /// The first records, each with one text for each column.
    pub first: Vec<Vec<String>>,
    /// Sizes of the images of each column that has encoded images.
    pub images: Vec<ImageSizes>,
}

/// Sizes of the encoded images of a column, in a sample of the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSizes {
    /// Name of the column.
    pub column: String,
    /// Number of records in the sample.
    pub sampled: usize,
    /// Number of records in the sample whose image cannot be read.
    pub damaged: usize,
    /// Width and height, in pixels, of the image with the fewest pixels. `None`: all are damaged.
    pub smallest: Option<(usize, usize)>,
    /// Width and height of the image in the middle, sorted by their number of pixels.
    pub median: Option<(usize, usize)>,
    /// Width and height of the image with the most pixels.
    pub largest: Option<(usize, usize)>,
}

/// Looks at the file at `path`, which may be a URL. It decodes the blocks of its first `records`
/// records, and a sample of the records if a column has images. `spec` says how the file is read;
/// it needs no training files. The call blocks.
///
/// # Errors
/// The file is missing, or no file of this format.
pub fn inspect(path: &Path, spec: &DataSpec, records: u64) -> Result<Inspected> {
    let source = open(path, spec)?;
    let outline = source.outline();
    let all: Vec<usize> = (0..outline.columns.len()).collect();
    let (mut first, mut left) = (Vec::new(), records);
    for (block, &in_block) in outline.blocks.iter().enumerate() {
        if left == 0 {
            break;
        }
        let columns = source.read(block, &all)?;
        for record in 0..in_block.min(left) as usize {
            first.push(columns.iter().map(|column| cell(column, record)).collect());
        }
        left -= in_block.min(left);
    }
    Ok(Inspected {
        records: outline.records(),
        blocks: outline.blocks.len(),
        columns: outline.columns.clone(),
        first,
        images: images(source.as_ref(), spec)?,
    })
}

/// Opens a file that no job describes. `path` may be a URL.
///
/// # Errors
/// The URL is not whole, or the file is missing, or no file of this format.
pub(crate) fn open(path: &Path, spec: &DataSpec) -> Result<Box<dyn Source>> {
    let located = match path.to_str() {
        Some(name) => {
            let shown = || Path::new(&data_url::shown(name)).to_owned();
            data_url::check(name).map_err(|reason| malformed(&shown(), reason))?;
            spec.locate(name, None)
        }
        None => path.to_owned(),
    };
    let path = located.as_path();
    let object = match spec.format {
        Format::Images => Object::of_folder(Folder::open(path, &())?.into()),
        Format::Index => Object::copy(path, Vec::new()),
        _ => Object::open(path, Access::InSequence, &())?,
    };
    formats::open(spec, &object, "values", path, &())
}

/// Returns the sizes of the images of each column that has some.
fn images(source: &dyn Source, spec: &DataSpec) -> Result<Vec<ImageSizes>> {
    let outline = source.outline();
    let blocks_max = if spec.format == Format::Images { usize::MAX } else { BLOCKS_SAMPLED };
    let places = sample::spread(&outline.blocks, IMAGES_SAMPLED, blocks_max);
    let Some(&first) = places.first() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (at, column) in outline.columns.iter().enumerate() {
        if !is_bytes(column) || !is_encoded(source, at, first)? {
            continue;
        }
        let (mut sizes, mut damaged) = (Vec::with_capacity(places.len()), 0);
        sample::visit(source, &places, &[at], |_, columns, row| {
            match pixels::size(columns[0].record(row)) {
                Ok((height, width)) => sizes.push((width, height)),
                Err(_) => damaged += 1,
            }
            Ok(())
        })?;
        sizes.sort_by_key(|&(width, height)| (width.saturating_mul(height), width));
        found.push(ImageSizes {
            column: column.name.clone(),
            sampled: places.len(),
            damaged,
            smallest: sizes.first().copied(),
            median: sizes.get(sizes.len() / 2).copied(),
            largest: sizes.last().copied(),
        });
    }
    Ok(found)
}

/// Returns whether a record of a column of bytes is an encoded image.
pub(crate) fn is_encoded(source: &dyn Source, column: usize, (block, row): sample::Place) -> Result<bool> {
    let columns = source.read(block, &[column])?;
    Ok(pixels::Encoding::of(columns[0].record(row)).is_some())
}

/// Returns one record's values as text, or why there are none.
fn cell(column: &Column, record: usize) -> String {
    match column.fault(record) {
        None => shown(column.spec(), column.record(record)),
        Some(Fault::Missing) => "(missing)".to_owned(),
        Some(Fault::Broken(reason)) => format!("(broken: {reason})"),
    }
}

/// Returns one record's values as text.
pub(crate) fn shown(spec: &ColumnSpec, values: &[u8]) -> String {
    let count = values.len() / spec.dtype.size();
    if spec.ragged && spec.dtype == ElementType::U8 {
        return match text(values) {
            Some(text) => {
                let some: String = text.chars().take(CHARACTERS_SHOWN).collect();
                format!("{some:?}{}", if some.len() < text.len() { " .." } else { "" })
            }
            None => format!("{count} bytes"),
        };
    }
    let mut texts = Vec::new();
    let some = &values[..count.min(VALUES_SHOWN) * spec.dtype.size()];
    each_f64(spec.dtype, some, |value| {
        texts.push(if spec.dtype == ElementType::F32 {
            (value as f32).to_string()
        } else {
            value.to_string()
        });
    });
    if count == 1 && spec.shape.is_empty() && !spec.ragged {
        return texts.remove(0);
    }
    format!("[{}{}]", texts.join(", "), if count > VALUES_SHOWN { ", .." } else { "" })
}

#[cfg(test)]
mod tests {
    use proto::spec::{FilesSpec, TokenType, TokensSpec};

    use super::*;

    fn spec(format: Format) -> DataSpec {
        DataSpec::of(format, FilesSpec::default())
    }

    #[test]
    fn a_file_shows_its_columns_and_first_records() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, "age,income\n30,1.5\n40,2\n50,3\n,x\n").unwrap();
        let found = inspect(&path, &spec(Format::Csv), 4).unwrap();
        assert_eq!(found.first[3][0], "(missing)");
        assert!(found.first[3][1].starts_with("(broken: line 5, column 1"), "{:?}", found.first);
        let found = inspect(&path, &spec(Format::Csv), 2).unwrap();
        assert_eq!((found.records, found.blocks, found.images.len()), (4, 1, 0));
        assert_eq!(found.columns[1].to_string(), "`income` f64[]");
        assert_eq!(found.first, [["30", "1.5"], ["40", "2"]]);
        assert!(inspect(&path, &spec(Format::Npy), 2).is_err());
    }

    #[test]
    fn a_token_file_is_cut_into_the_records_that_the_caller_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.bin");
        let values: Vec<u8> = (0..9u16).flat_map(u16::to_le_bytes).collect();
        std::fs::write(&path, values).unwrap();
        let tokens = TokensSpec { dtype: TokenType::U16, block: 4, stride: None };
        let found = inspect(&path, &DataSpec { tokens: Some(tokens), ..spec(Format::Tokens) }, 1).unwrap();
        assert_eq!(
            (found.records, &found.first[0][..]),
            (2, &["[0, 1, 2, 3]".to_owned(), "[1, 2, 3, 4]".to_owned()][..])
        );
    }

    #[test]
    fn images_show_the_smallest_the_median_and_the_largest_size() {
        let folder = tempfile::tempdir().unwrap();
        let class = folder.path().join("a");
        std::fs::create_dir(&class).unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/pixels/golden");
        for name in ["1x1.jpg", "3x33.jpg", "9x1.jpg"] {
            std::fs::copy(golden.join(name), class.join(name)).unwrap();
        }
        std::fs::write(class.join("broken.png"), b"\x89PNG").unwrap();
        let found = inspect(folder.path(), &spec(Format::Images), 0).unwrap().images;
        let size = |name: &str| {
            let bytes = std::fs::read(golden.join(name)).unwrap();
            let (height, width) = pixels::size(&bytes).unwrap();
            Some((width, height))
        };
        let expected = ImageSizes {
            column: "image".to_owned(),
            sampled: 4,
            damaged: 1,
            smallest: Some((1, 1)),
            median: size("9x1.jpg"),
            largest: size("3x33.jpg"),
        };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn values_are_shown_in_their_kind_and_not_without_end() {
        let text = |value: &[u8]| shown(&ColumnSpec::ragged("t", ElementType::U8, []), value);
        assert_eq!((text(b"Ann"), text(b"\x00\xFF")), ("\"Ann\"".to_owned(), "2 bytes".to_owned()));
        assert!(text("é".repeat(100).as_bytes()).ends_with("\" .."));
        let numbers = ColumnSpec::fixed("x", ElementType::U8, [3, 3]);
        assert_eq!(shown(&numbers, &[7; 9]), "[7, 7, 7, 7, 7, 7, 7, 7, ..]");
        let float = ColumnSpec::fixed("x", ElementType::F32, []);
        assert_eq!(shown(&float, &0.1f32.to_le_bytes()), "0.1");
        assert_eq!(shown(&ColumnSpec::ragged("x", ElementType::I32, []), &[]), "[]");
    }
}
