//! A picture with some images of a file side by side, for people: a contact sheet.

mod font;

use std::path::Path;

use proto::column::ColumnSpec;
use proto::spec::{DataSpec, Format};

use crate::column::Column;
use crate::error::{Result, malformed, wrong};
use crate::format::Source;
use crate::pixels::Image;
use crate::preview::{decoded, fitted, is_bytes, png, raw};
use crate::{inspect, sample};

/// Longer side of an image on the sheet, in pixels.
const SIDE: usize = 128;

/// Pixels around an image.
const MARGIN: usize = 4;

/// Height of the place for the text below an image.
const TEXT_HEIGHT: usize = 2 * MARGIN + 2 * font::height();

/// Width and height of the place of an image with its text.
const TILE: (usize, usize) = (SIDE + 2 * MARGIN, SIDE + 2 * MARGIN + TEXT_HEIGHT);

/// Images in a row of the sheet.
const COLUMNS: usize = 8;

/// Most blocks that are decoded for a sheet. In a folder of images each image is a block.
const BLOCKS_MAX: usize = 8;

/// Grey of the place of an image that cannot be decoded.
const DAMAGED: u8 = 200;

/// Names of columns whose values stand below the images, if the caller names none.
const LABELS: [&str; 6] = ["class", "cls", "label", "labels", "target", "y"];

/// Images of a file, side by side with their classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContactSheet {
    /// The picture, as the bytes of a PNG file.
    pub png: Vec<u8>,
    /// Number of images.
    pub images: usize,
    /// Number of images among them that cannot be decoded. Their places are grey.
    pub damaged: usize,
}

/// Draws up to `images` images of the file or folder at `path`, spread evenly over it. `spec` says
/// how the file is read. Its `label` names the column whose values stand below the images. The call
/// blocks.
///
/// # Errors
/// The file is missing, no file of this format, or has no column of images.
pub fn contact_sheet(path: &Path, spec: &DataSpec, images: usize) -> Result<ContactSheet> {
    let source = inspect::open(path, spec)?;
    let outline = source.outline();
    let blocks_max = if spec.format == Format::Images { usize::MAX } else { BLOCKS_MAX };
    let places = sample::spread(&outline.blocks, images, blocks_max);
    let Some(&first) = places.first() else { return wrong(path, "the file has no records, so no images") };
    let image = match spec.format {
        Format::Images => Some(0),
        _ => column_of_images(source.as_ref(), first)?,
    };
    let image = image.ok_or_else(|| {
        let names: Vec<_> = outline.columns.iter().take(20).map(ToString::to_string).collect();
        malformed(
            path,
            format!(
                "no column of images: neither JPEG, PNG or WebP files nor u8[height, width] or u8[height, width, 3]; there \
                 are {}",
                names.join(", ")
            ),
        )
    })?;
    let label = label(path, spec, &outline.columns)?;
    let wanted: Vec<usize> = [Some(image), label].into_iter().flatten().collect();

    let columns = COLUMNS.min(places.len());
    let mut sheet = Canvas::white(columns * TILE.0, places.len().div_ceil(columns) * TILE.1);
    let (mut at, mut damaged) = (0, 0);
    sample::visit(source.as_ref(), &places, &wanted, |record, columns_read, row| {
        let (left, top) = (at % columns * TILE.0 + MARGIN, at / columns * TILE.1 + MARGIN);
        match decoded(&columns_read[0], row) {
            Ok(image) => sheet.put(&fitted(&image, SIDE), left, top),
            Err(_) => {
                damaged += 1;
                sheet.fill(left, top, SIDE, SIDE, DAMAGED);
            }
        }
        let text = caption(source.as_ref(), spec, record, columns_read.get(1), row);
        sheet.write(&text, left, top + SIDE + MARGIN, SIDE);
        at += 1;
        Ok(())
    })?;
    let png = png(&sheet.0).map_err(|error| malformed(path, format!("the picture: {error}")))?;
    Ok(ContactSheet { png, images: places.len(), damaged })
}

/// Returns the first column with images. Encoded images are known by the bytes of the record at
/// `first`.
fn column_of_images(source: &dyn Source, first: sample::Place) -> Result<Option<usize>> {
    for (at, spec) in source.outline().columns.iter().enumerate() {
        if raw(spec).is_some() || (is_bytes(spec) && inspect::is_encoded(source, at, first)?) {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Returns the column whose values stand below the images.
fn label(path: &Path, spec: &DataSpec, columns: &[ColumnSpec]) -> Result<Option<usize>> {
    let find = |name: &str| columns.iter().position(|column| column.name == name);
    match &spec.label {
        None => Ok(LABELS.into_iter().find_map(find)),
        Some(name) => match find(name) {
            Some(at) => Ok(Some(at)),
            None => {
                let names: Vec<_> = columns.iter().take(20).map(|column| column.name.as_str()).collect();
                wrong(path, format!("label `{name}`: no such column; there are {}", names.join(", ")))
            }
        },
    }
}

/// Returns the text below an image: its class or label, otherwise the number of its record.
fn caption(source: &dyn Source, spec: &DataSpec, record: u64, label: Option<&Column>, row: usize) -> String {
    // The path of an image begins with its class.
    let name = source.name(record).filter(|_| spec.format == Format::Images && spec.label.is_none());
    if let Some((class, _)) = name.as_deref().and_then(|name| name.split_once('/')) {
        return class.to_owned();
    }
    match label {
        Some(column) => inspect::shown(column.spec(), column.record(row)).trim_matches('"').to_owned(),
        None => format!("#{record}"),
    }
}

/// A picture in red, green and blue.
struct Canvas(Image);

impl Canvas {
    fn white(width: usize, height: usize) -> Self {
        Self(Image { height, width, channels: 3, values: vec![u8::MAX; height * width * 3] })
    }

    /// Copies an image of three channels to a place.
    fn put(&mut self, image: &Image, left: usize, top: usize) {
        let own_row = 3 * self.0.width;
        for (row, values) in image.values.chunks_exact(3 * image.width).enumerate() {
            let begin = (top + row) * own_row + 3 * left;
            self.0.values[begin..begin + values.len()].copy_from_slice(values);
        }
    }

    fn fill(&mut self, left: usize, top: usize, width: usize, height: usize, grey: u8) {
        self.put(&Image { height, width, channels: 3, values: vec![grey; height * width * 3] }, left, top);
    }

    /// Writes a line of black text, twice as large as the font's dots if it then fits into `width`
    /// pixels. The end of a longer text is cut off.
    fn write(&mut self, text: &str, left: usize, top: usize, width: usize) {
        let scale = if 2 * font::width(text) <= width { 2 } else { 1 };
        font::draw(text, |column, row| {
            if (column + 1) * scale <= width {
                self.fill(left + column * scale, top + row * scale, scale, scale, 0);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proto::spec::FilesSpec;

    use super::*;
    use crate::formats::idx::tests::write as idx;
    use crate::pixels;

    fn spec(format: Format) -> DataSpec {
        DataSpec::of(format, FilesSpec::default())
    }

    fn pixel(image: &Image, x: usize, y: usize) -> [u8; 3] {
        let begin = 3 * (y * image.width + x);
        [image.values[begin], image.values[begin + 1], image.values[begin + 2]]
    }

    /// Compares a pixel of an image that was resized.
    fn is_near(found: [u8; 3], expected: [u8; 3]) -> bool {
        found.iter().zip(expected).all(|(found, expected)| found.abs_diff(expected) <= 1)
    }

    /// Encodes an image of one colour.
    fn encoded(height: usize, width: usize, color: [u8; 3]) -> Vec<u8> {
        png(&Image { height, width, channels: 3, values: color.repeat(height * width) }).unwrap()
    }

    #[test]
    fn images_of_a_folder_stand_side_by_side_with_their_class() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        write("blue/wide.png", &encoded(10, 40, [0, 0, 255]));
        write("red/broken.png", b"\x89PNG");
        write("red/high.png", &encoded(300, 100, [255, 0, 0]));
        let sheet = contact_sheet(folder.path(), &spec(Format::Images), 32).unwrap();
        assert_eq!((sheet.images, sheet.damaged), (3, 1));
        let image = pixels::decode(&sheet.png, 3).unwrap();
        assert_eq!((image.width, image.height), (3 * TILE.0, TILE.1));
        // The wide one has the full width, and nothing below.
        assert!(is_near(pixel(&image, MARGIN + SIDE - 1, MARGIN + 31), [0, 0, 255]));
        assert_eq!(pixel(&image, MARGIN + SIDE - 1, MARGIN + 32), [255; 3]);
        assert_eq!(pixel(&image, TILE.0 + MARGIN, MARGIN), [DAMAGED; 3]);
        assert!(is_near(pixel(&image, 2 * TILE.0 + MARGIN, MARGIN + SIDE - 1), [255, 0, 0]));
        // `B` of "blue" begins with a full row of dots, and `R` of "red" with one that is the same.
        let letter = |tile: usize| {
            (0..8).map(move |dot| (tile * TILE.0 + MARGIN + dot, MARGIN + SIDE + MARGIN)).collect::<Vec<_>>()
        };
        assert!(letter(0).into_iter().all(|(x, y)| pixel(&image, x, y) == [0; 3]));
        assert!(letter(2).into_iter().all(|(x, y)| pixel(&image, x, y) == [0; 3]));
    }

    #[test]
    fn columns_of_pixels_are_images_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x-idx3-ubyte");
        let values: Vec<u8> = (0..20).flat_map(|record| [record * 10; 4]).collect();
        std::fs::write(&path, idx(&[20, 2, 2], &values)).unwrap();
        let sheet = contact_sheet(&path, &spec(Format::Idx), 10).unwrap();
        assert_eq!((sheet.images, sheet.damaged), (10, 0));
        let image = pixels::decode(&sheet.png, 3).unwrap();
        assert_eq!((image.width, image.height), (COLUMNS * TILE.0, 2 * TILE.1));
        // The second row begins with the ninth image, which is record 16.
        assert!(is_near(pixel(&image, MARGIN + SIDE / 2, TILE.1 + MARGIN + SIDE / 2), [160; 3]));
    }

    #[test]
    fn a_file_without_images_says_what_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, "a,b\n1,2\n").unwrap();
        let message = contact_sheet(&path, &spec(Format::Csv), 4).unwrap_err().to_string();
        assert!(
            message.contains("no column of images") && message.contains("`a` f64[], `b` f64[]"),
            "{message}"
        );
        std::fs::write(&path, "a,b\n").unwrap();
        let message = contact_sheet(&path, &spec(Format::Csv), 4).unwrap_err().to_string();
        assert!(message.contains("the file has no records"), "{message}");
    }
}
