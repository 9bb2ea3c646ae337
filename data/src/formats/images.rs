//! Folders of images, one subfolder for each class, as torchvision's `ImageFolder` has them.
//!
//! ```text
//! train/cat/1.jpg    train/cat/old/2.PNG    train/dog/a.webp
//! ```
//!
//! Columns are `image`, the bytes of the file, and `class`, the place of the subfolder's name among
//! the sorted names of the job's first training folder. So all folders of a job have the same
//! numbers. Records are sorted by class and path. Links are followed.
//!
//! The content of a folder is known by the names and sizes of its files, because reading all images
//! once only for a checksum would take as long as an epoch.

use std::path::Path;
use std::sync::Arc;

use proto::column::{ColumnSpec, ElementType};

use crate::column::Column;
use crate::error::{Result, wrong};
use crate::folder::{self, ENDINGS, Folder, OBSERVED};
use crate::format::{Outline, Source};
use crate::object::{Content, Object};
use crate::observer::Observer;

/// Columns, by their index.
const IMAGE: usize = 0;

/// The images of a folder.
#[derive(Debug)]
struct Images {
    folder: Arc<Folder>,
    /// Class of each record.
    classes: Vec<u32>,
    outline: Outline,
}

/// Opens a folder of images. `first` is the folder whose subfolders number the classes. It may be a
/// URL.
///
/// # Errors
/// `first` cannot be read, or the folder has a class without images, or one that `first` has not.
pub(crate) fn open(folder: Arc<Folder>, first: &Path) -> Result<Box<dyn Source>> {
    let known = match first == folder.path() {
        true => folder.classes().to_vec(),
        false => folder::classes(first)?,
    };
    if known.is_empty() {
        return wrong(
            first,
            "no subfolders; put the images of each class into a subfolder with the class's name",
        );
    }
    let mut classes = Vec::with_capacity(folder.len());
    for name in folder.classes() {
        let class = known.binary_search(name).ok().and_then(|class| u32::try_from(class).ok());
        let Some(class) = class else {
            return wrong(
                folder.path(),
                format!(
                    "class folder `{name}`: the first training folder {} has no such class; rename or remove it",
                    first.display()
                ),
            );
        };
        let begin = classes.len();
        let images = (begin..folder.len()).take_while(|&image| folder.class(image) == name);
        classes.extend(images.map(|_| class));
        if classes.len() == begin {
            return wrong(
                &folder.path().join(name),
                format!(
                    "a class folder without images; put files of the endings {} there, or remove it",
                    ENDINGS.join(", ")
                ),
            );
        }
    }
    let outline = Outline { columns: columns(), blocks: vec![1; classes.len()] };
    Ok(Box::new(Images { folder, classes, outline }))
}

fn columns() -> Vec<ColumnSpec> {
    vec![ColumnSpec::ragged("image", ElementType::U8, []), ColumnSpec::fixed("class", ElementType::I64, [])]
}

impl Source for Images {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let column = |&index: &usize| {
            let mut column = Column::with_capacity(self.outline.columns[index].clone(), 1);
            match index {
                IMAGE => column.push(&self.folder.read(block)?),
                _ => column.push(&i64::from(self.classes[block]).to_le_bytes()),
            }
            Ok(column)
        };
        columns.iter().map(column).collect()
    }

    fn name(&self, record: u64) -> Option<String> {
        let record = usize::try_from(record).ok().filter(|&record| record < self.folder.len())?;
        Some(self.folder.name(record).to_owned())
    }

    fn bytes(&self, _: &Object) -> u64 {
        self.folder.sizes().iter().sum()
    }

    fn content(&self, object: &Object, content: Content, observer: &dyn Observer) -> Result<Content> {
        let sizes = self.folder.sizes().iter().enumerate();
        let crc32c = sizes.fold(content.crc32c, |crc, (record, size)| {
            if record.is_multiple_of(OBSERVED) {
                observer.advance();
            }
            let crc = crc32c::crc32c_append(crc, self.folder.name(record).as_bytes());
            crc32c::crc32c_append(crc, &size.to_le_bytes())
        });
        Ok(Content { bytes: content.bytes + Source::bytes(self, object), crc32c })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        folder
    }

    fn open(folder: &Path, first: &Path) -> Result<Box<dyn Source>> {
        super::open(Arc::new(Folder::open(folder, &())?), first)
    }

    fn error(folder: &Path, first: &Path) -> String {
        open(folder, first).err().expect("an error").to_string()
    }

    #[test]
    fn each_subfolder_is_a_class_and_each_image_a_record() {
        let train = folder(&[
            ("train/dog/b.jpg", b"dog b"),
            ("train/dog/old/a.PNG", b"dog a"),
            ("train/cat/1.webp", b"cat"),
            ("train/cat/notes.txt", b"no image"),
            ("train/.hidden/1.jpg", b"no class"),
            ("validation/dog/1.jpeg", b"validates"),
        ]);
        let (first, validation) = (train.path().join("train"), train.path().join("validation"));
        let source = open(&first, &first).unwrap();
        assert_eq!(source.outline().blocks, [1, 1, 1]);
        let records = (0..3).map(|block| source.read(block, &[1, 0]).unwrap());
        let records: Vec<_> = records
            .map(|columns| (columns[0].values::<i64>().unwrap()[0], columns[1].record(0).to_vec()))
            .collect();
        assert_eq!(records, [(0, b"cat".to_vec()), (1, b"dog b".to_vec()), (1, b"dog a".to_vec())]);
        // A folder without cats still calls dogs 1.
        let source = open(&validation, &first).unwrap();
        assert_eq!(source.read(0, &[1]).unwrap()[0].values(), Some(&[1i64][..]));
    }

    #[test]
    fn folders_that_make_no_classes_say_why() {
        let files = folder(&[
            ("train/a/1.jpg", b"1"),
            ("other/b/1.jpg", b"1"),
            ("empty/a/x.txt", b""),
            ("flat/1.jpg", b""),
        ]);
        let path = |name: &str| files.path().join(name);
        assert!(
            error(&path("other"), &path("train")).contains("class folder `b`: the first training folder")
        );
        assert!(error(&path("empty"), &path("train")).contains("empty/a: a class folder without images"));
        assert!(error(&path("flat"), &path("flat")).contains("no subfolders"));
        assert!(error(&path("missing"), &path("train")).contains("missing: No such file"));
        std::os::unix::fs::symlink(path("train/a"), path("train/a/loop")).unwrap();
        assert!(error(&path("train"), &path("train")).contains("a/loop: a link to"));
    }

    #[test]
    fn a_file_that_changes_its_size_is_refused() {
        let files = folder(&[("a/1.jpg", b"12345")]);
        let source = open(files.path(), files.path()).unwrap();
        let object = Object::copy(files.path(), Vec::new());
        let content = source.content(&object, Content::default(), &()).unwrap();
        for changed in [&b"1234"[..], b"123456"] {
            std::fs::write(files.path().join("a/1.jpg"), changed).unwrap();
            let message = source.read(0, &[0]).unwrap_err().to_string();
            assert!(message.contains("no longer the 5 bytes"), "{message}");
        }
        let source = open(files.path(), files.path()).unwrap();
        assert_eq!((content.bytes, source.bytes(&object)), (5, 6));
        assert_ne!(source.content(&object, Content::default(), &()).unwrap().crc32c, content.crc32c);
    }
}
