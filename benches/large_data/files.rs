//! The data sets: arrays and images are written here, `ebb data convert` makes the other formats.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use ebbflow::random::Keyed;

use super::harness::s3::S3;
use super::harness::succeed;

/// Shape of a record: 128 KiB.
const SHAPE: [u64; 2] = [128, 1024];

/// Width and height of an image. Its pixels have about as many bytes as another record.
const PIXELS: u64 = 362;

const CLASSES: u64 = 8;

/// Files that hold arrays. For each range moto reads the whole object, so large ones take it hours.
const FILES: u64 = 96;

/// Bytes of a shard of Parquet or tar.
const SHARD: &str = "32MiB";

const MICRO: u64 = 32;

/// Records of a window, and most bytes of a block.
const WINDOW: u64 = 128;
const BLOCK: u64 = 4 << 20;

const EFFECTIVE: u64 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Npy,
    Parquet,
    Tar,
    /// Folders of PNG files.
    Images,
}

/// A data set on the disk.
pub(crate) struct Data {
    kind: Kind,
    folder: PathBuf,
    pub(crate) records: u64,
    /// Bytes of all files.
    pub(crate) bytes: u64,
}

impl Data {
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the bytes of one window and one block, which a lane costs that changes its worker.
    pub(crate) fn lane(&self) -> u64 {
        WINDOW * self.bytes / self.records + BLOCK
    }

    /// Returns the steps of an epoch.
    pub(crate) fn steps(&self) -> u64 {
        self.records.div_ceil(EFFECTIVE)
    }

    /// Returns all files, sorted.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = files(&self.folder);
        files.retain(|file| file.file_name().is_none_or(|name| name != "data.toml"));
        files
    }
}

/// Returns all files below a folder, sorted.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// Writes a data set of about so many bytes below `root`, or finds it there.
pub(crate) fn write(root: &Path, kind: Kind, bytes: u64) -> Data {
    let records = bytes / (SHAPE[0] * SHAPE[1]);
    let folder = root.join(format!("{kind:?}").to_lowercase());
    let whole = root.join(format!("{kind:?}.whole"));
    if !whole.exists() {
        drop(fs::remove_dir_all(&folder));
        match kind {
            Kind::Npy => arrays(&folder, records),
            Kind::Images => images(&folder, records),
            Kind::Parquet | Kind::Tar => {
                let arrays = write(root, Kind::Npy, bytes).folder;
                convert(&arrays, kind, &folder);
            }
        }
        fs::write(whole, "").expect("a file");
    }
    let data = Data { kind, folder, records, bytes: 0 };
    let bytes = data.files().iter().map(|file| fs::metadata(file).expect("a file").len()).sum();
    Data { bytes, ..data }
}

/// Writes pairs of NumPy files.
fn arrays(folder: &Path, records: u64) {
    fs::create_dir_all(folder).expect("a folder");
    let mut number = 0;
    for file in 0..FILES.min(records) {
        let count = records / FILES.min(records) + u64::from(file < records % FILES.min(records));
        let path = |column: &str| folder.join(format!("{column}-{file:02}.npy"));
        let shape = format!("({count}, {}, {})", SHAPE[0], SHAPE[1]);
        let mut features = array(&path("features"), "|u1", &shape);
        let mut labels = array(&path("labels"), "<i8", &format!("({count},)"));
        for _ in 0..count {
            let (values, class) = record(number, SHAPE[0] * SHAPE[1]);
            features.write_all(&values).expect("the disk has room");
            labels.write_all(&class.to_le_bytes()).expect("the disk has room");
            number += 1;
        }
        features.flush().and_then(|()| labels.flush()).expect("the disk has room");
    }
}

/// Begins a NumPy file.
fn array(path: &Path, kind: &str, shape: &str) -> BufWriter<File> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).expect("a file"));
    let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    file.write_all(b"\x93NUMPY\x01\x00").expect("the disk has room");
    file.write_all(&(header.len() as u16).to_le_bytes()).expect("the disk has room");
    file.write_all(header.as_bytes()).expect("the disk has room");
    file
}

/// Returns values and class of a record. The values do not compress.
fn record(number: u64, bytes: u64) -> (Vec<u8>, u64) {
    let mut keyed = Keyed::new(7, "large data", number);
    let values = (0..bytes.div_ceil(8)).flat_map(|_| keyed.next_u64().to_le_bytes());
    (values.take(bytes as usize).collect(), number % CLASSES)
}

/// Writes PNG files of grey pixels, in a folder for each class.
fn images(folder: &Path, records: u64) {
    for class in 0..CLASSES {
        fs::create_dir_all(folder.join(format!("class-{class}"))).expect("a folder");
    }
    for number in 0..records {
        let (values, class) = record(number, PIXELS * PIXELS);
        let path = folder.join(format!("class-{class}/{number:06}.png"));
        fs::write(path, png(&values)).expect("the disk has room");
    }
}

/// Returns a PNG file of so many grey pixels, without compression.
fn png(pixels: &[u8]) -> Vec<u8> {
    let mut lines = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::none());
    for line in pixels.chunks(PIXELS as usize) {
        // Each line begins with its filter: none.
        lines.write_all(&[0]).and_then(|()| lines.write_all(line)).expect("memory");
    }
    let lines = lines.finish().expect("memory");
    let size = (PIXELS as u32).to_be_bytes();
    let head = [&size[..], &size, &[8, 0, 0, 0, 0]].concat();
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, content) in [(b"IHDR", &head[..]), (b"IDAT", &lines), (b"IEND", &[])] {
        let named = [&name[..], content].concat();
        file.extend((content.len() as u32).to_be_bytes());
        file.extend(&named);
        file.extend(crc32fast::hash(&named).to_be_bytes());
    }
    file
}

fn convert(arrays: &Path, kind: Kind, folder: &Path) {
    let of = |column: &str| {
        let files = files(arrays).into_iter();
        let name = format!("{column}-");
        let is_of = move |file: &PathBuf| {
            file.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&name))
        };
        let column = column.to_owned();
        files.filter(is_of).map(move |file| format!("{column}={}", file.display()))
    };
    let sources: Vec<String> = of("features").chain(of("labels")).collect();
    let name = format!("{kind:?}").to_lowercase();
    let folder = folder.display().to_string();
    let words = ["data", "convert", "--to", &name, "--out", &folder, "--shard-bytes", SHARD];
    succeed(words.into_iter().chain(sources.iter().map(String::as_str)));
}

/// Returns the job file of one epoch.
pub(crate) fn job(data: &Data, order: &str, on_s3: bool) -> String {
    let section = match data.kind {
        Kind::Parquet | Kind::Tar => fs::read_to_string(data.folder.join("data.toml")).expect("data.toml"),
        Kind::Npy => {
            let of = |column: &str| -> Vec<String> {
                let files = data.files().into_iter().map(|file| file.display().to_string());
                files.filter(|file| file.contains(&format!("/{column}-"))).collect()
            };
            let (features, labels) = (of("features"), of("labels"));
            format!("[data]\nformat = \"npy\"\ntrain = {{ features = {features:?}, labels = {labels:?} }}\n")
        }
        Kind::Images => format!(
            "[data]\nformat = \"images\"\ntrain = {{ files = [\"{}\"] }}\ninputs = [\"image\"]\nlabel = \"class\"\n\
             [data.transforms]\nimage = [{{ op = \"decode\" }}, {{ op = \"center_crop\", size = {PIXELS} }}, \
             {{ op = \"normalize\", mean = 0.5, std = 0.3 }}]\n",
            data.folder.display()
        ),
    };
    let section = match on_s3 {
        true => {
            section.replace(&data.folder.display().to_string(), &format!("s3://{}/{}", S3::BUCKET, key(data)))
        }
        false => section,
    };
    let label = if data.kind == Kind::Tar { "label = \"labels.cls\"\n" } else { "" };
    let normalize = if data.kind == Kind::Images { "" } else { "normalize = { scale = 255 }\n" };
    let window = match order {
        "window" => format!("window = {WINDOW}\ninterleave = 8\n"),
        _ => String::new(),
    };
    let section = section.replacen(
        "[data]\n",
        &format!("[data]\nshuffle = \"{order}\"\n{window}{normalize}{label}"),
        1,
    );
    format!(
        "name = \"large\"\nepochs = 1\nseed = 5\nfleet = {{ ps = 2 }}\n\
         model = {{ builtin = \"mlp\", loss = \"cross_entropy\", options = {{ hidden = [4] }} }}\n\
         batch = {{ micro = {MICRO}, effective = {EFFECTIVE} }}\n\
         optimizer = {{ kind = \"sgd\", learning_rate = 1e-3 }}\n{section}"
    )
}

/// Returns the beginning of the keys of a data set.
fn key(data: &Data) -> String {
    format!("{:?}", data.kind).to_lowercase()
}

fn keys(data: &Data) -> Vec<(String, PathBuf)> {
    let name = |file: &Path| file.strip_prefix(&data.folder).expect("below the folder").display().to_string();
    data.files().into_iter().map(|file| (format!("{}/{}", key(data), name(&file)), file)).collect()
}

/// Copies a data set to the server.
pub(crate) fn upload(server: &S3, data: &Data) {
    for (key, file) in keys(data) {
        assert_eq!(server.request("PUT", &key, &fs::read(file).expect("a file")).0, 200, "{key}");
    }
}

/// Removes a data set from the server, which keeps all in memory.
pub(crate) fn remove(server: &S3, data: &Data) {
    for (key, _) in keys(data) {
        server.request("DELETE", &key, b"");
    }
}
