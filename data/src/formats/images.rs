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

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use proto::column::{ColumnSpec, ElementType};
use walkdir::WalkDir;

use crate::column::Column;
use crate::error::{Error, Result, malformed, wrong};
use crate::format::{Outline, Source};
use crate::object::{Content, Object};
use crate::observer::Observer;
use crate::remote;

/// Endings of the files that count as images, in lower case.
const ENDINGS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// Columns, by their index.
const IMAGE: usize = 0;

/// The images of a folder.
#[derive(Debug)]
struct Images {
    folder: PathBuf,
    /// Paths below the folder, one after the other.
    names: String,
    /// End of each record's path in `names`.
    ends: Vec<usize>,
    /// Bytes of each record's file.
    sizes: Vec<u64>,
    /// Class of each record.
    classes: Vec<u32>,
    outline: Outline,
}

/// Opens a folder of images. `first` is the folder whose subfolders number the classes.
///
/// # Errors
/// A folder cannot be read, has a loop of links, has no images, or has a class that `first` has
/// not.
pub(crate) fn open(folder: &Path, first: &Path, observer: &dyn Observer) -> Result<Box<dyn Source>> {
    if remote::url(folder).is_some() {
        return wrong(folder, "folders of images are local; read a tar archive instead");
    }
    let known = subfolders(first)?;
    let own = subfolders(folder)?;
    if known.is_empty() {
        return wrong(
            first,
            "no subfolders; put the images of each class into a subfolder with the class's name",
        );
    }
    let mut images = Images {
        folder: folder.to_owned(),
        names: String::new(),
        ends: Vec::new(),
        sizes: Vec::new(),
        classes: Vec::new(),
        outline: Outline { columns: columns(), blocks: Vec::new() },
    };
    for name in &own {
        let class = known.binary_search(name).ok().and_then(|class| u32::try_from(class).ok());
        let Some(class) = class else {
            return wrong(
                folder,
                format!(
                    "class folder `{name}`: the first training folder {} has no such class; rename or remove it",
                    first.display()
                ),
            );
        };
        let before = images.ends.len();
        images.add(name, class, observer)?;
        if images.ends.len() == before {
            return wrong(
                &folder.join(name),
                format!(
                    "a class folder without images; put files of the endings {} there, or remove it",
                    ENDINGS.join(", ")
                ),
            );
        }
    }
    images.outline.blocks = vec![1; images.ends.len()];
    Ok(Box::new(images))
}

fn columns() -> Vec<ColumnSpec> {
    vec![ColumnSpec::ragged("image", ElementType::U8, []), ColumnSpec::fixed("class", ElementType::I64, [])]
}

/// Returns the sorted names of a folder's subfolders. Hidden ones do not count.
fn subfolders(folder: &Path) -> Result<Vec<String>> {
    let failed = |source| Error::File { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in folder.read_dir().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_folder = entry.path().is_dir();
        let Ok(name) = entry.file_name().into_string() else {
            return wrong(&entry.path(), "a name that is no UTF-8; rename it");
        };
        if is_folder && !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

impl Images {
    /// Adds the images of a class, in the order of their paths.
    fn add(&mut self, name: &str, class: u32, observer: &dyn Observer) -> Result<()> {
        let walk = WalkDir::new(self.folder.join(name)).follow_links(true).sort_by_file_name();
        for entry in walk {
            let entry = entry.map_err(|error| {
                let path = error.path().unwrap_or(&self.folder).to_owned();
                match error.loop_ancestor() {
                    Some(ancestor) => malformed(
                        &path,
                        format!("a link to {}, which holds it; remove the link", ancestor.display()),
                    ),
                    None => Error::File { path, source: error.into() },
                }
            })?;
            let ending = entry.path().extension().map(|ending| ending.to_string_lossy().to_lowercase());
            if !entry.file_type().is_file()
                || !ending.is_some_and(|ending| ENDINGS.contains(&ending.as_str()))
            {
                continue;
            }
            let below = entry.path().strip_prefix(&self.folder).unwrap_or(entry.path());
            let Some(below) = below.to_str() else {
                return wrong(entry.path(), "a name that is no UTF-8; rename it");
            };
            let metadata = entry
                .metadata()
                .map_err(|error| Error::File { path: entry.path().to_owned(), source: error.into() })?;
            self.names.push_str(below);
            self.ends.push(self.names.len());
            self.sizes.push(metadata.len());
            self.classes.push(class);
            if self.ends.len().is_multiple_of(1024) {
                observer.advance();
            }
        }
        Ok(())
    }

    fn path(&self, record: usize) -> &str {
        let begin = if record == 0 { 0 } else { self.ends[record - 1] };
        &self.names[begin..self.ends[record]]
    }

    /// Reads a record's file, which must have the size that it had when the folder was opened.
    fn bytes(&self, record: usize) -> Result<Vec<u8>> {
        let path = self.folder.join(self.path(record));
        let (size, mut bytes) = (self.sizes[record], Vec::with_capacity(self.sizes[record] as usize + 1));
        let read = File::open(&path).and_then(|file| file.take(size + 1).read_to_end(&mut bytes));
        read.map_err(|source| Error::File { path: path.clone(), source })?;
        if bytes.len() as u64 != size {
            return wrong(
                &path,
                format!(
                    "the file has no longer the {size} bytes that it had when this worker opened the folder; restore it, or \
                     submit the job anew"
                ),
            );
        }
        Ok(bytes)
    }
}

impl Source for Images {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let column = |&index: &usize| {
            let mut column = Column::with_capacity(self.outline.columns[index].clone(), 1);
            match index {
                IMAGE => column.push(&self.bytes(block)?),
                _ => column.push(&i64::from(self.classes[block]).to_le_bytes()),
            }
            Ok(column)
        };
        columns.iter().map(column).collect()
    }

    fn name(&self, record: u64) -> Option<String> {
        let record = usize::try_from(record).ok().filter(|&record| record < self.ends.len())?;
        Some(self.path(record).to_owned())
    }

    fn bytes(&self, _: &Object) -> u64 {
        self.sizes.iter().sum()
    }

    fn content(&self, object: &Object, content: Content, observer: &dyn Observer) -> Result<Content> {
        let records = 0..self.ends.len();
        let crc32c = records.fold(content.crc32c, |crc, record| {
            if record.is_multiple_of(1024) {
                observer.advance();
            }
            let crc = crc32c::crc32c_append(crc, self.path(record).as_bytes());
            crc32c::crc32c_append(crc, &self.sizes[record].to_le_bytes())
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

    fn error(folder: &Path, first: &Path) -> String {
        open(folder, first, &()).err().expect("an error").to_string()
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
        let source = open(&first, &first, &()).unwrap();
        assert_eq!(source.outline().blocks, [1, 1, 1]);
        let records = (0..3).map(|block| source.read(block, &[1, 0]).unwrap());
        let records: Vec<_> = records
            .map(|columns| (columns[0].values::<i64>().unwrap()[0], columns[1].record(0).to_vec()))
            .collect();
        assert_eq!(records, [(0, b"cat".to_vec()), (1, b"dog b".to_vec()), (1, b"dog a".to_vec())]);
        // A folder without cats still calls dogs 1.
        let source = open(&validation, &first, &()).unwrap();
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
        let source = open(files.path(), files.path(), &()).unwrap();
        let object = Object::copy(files.path(), Vec::new());
        let content = source.content(&object, Content::default(), &()).unwrap();
        for changed in [&b"1234"[..], b"123456"] {
            std::fs::write(files.path().join("a/1.jpg"), changed).unwrap();
            let message = source.read(0, &[0]).unwrap_err().to_string();
            assert!(message.contains("no longer the 5 bytes"), "{message}");
        }
        let source = open(files.path(), files.path(), &()).unwrap();
        assert_eq!((content.bytes, source.bytes(&object)), (5, 6));
        assert_ne!(source.content(&object, Content::default(), &()).unwrap().crc32c, content.crc32c);
    }
}
