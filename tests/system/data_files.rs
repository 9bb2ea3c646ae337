//! `ebb data`: looking at data files, measuring them, and writing them in another format.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{fail, root, succeed};

/// Runs `ebb` and reads the JSON object that it prints.
fn object(args: &[&str]) -> Value {
    let said = succeed(args);
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Copies golden images into a folder with two classes.
fn images(folder: &Path) {
    let golden = root().join("data/src/pixels/golden");
    for (class, names) in [("ant", ["420.jpg", "rgb.png"]), ("bee", ["lossy.webp", "3x33.jpg"])] {
        fs::create_dir_all(folder.join(class)).unwrap();
        for name in names {
            fs::copy(golden.join(name), folder.join(class).join(name)).unwrap();
        }
    }
}

#[test]
fn images_show_their_sizes_and_make_a_contact_sheet() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, picture) = (dir.path().join("train"), dir.path().join("sheet.png"));
    images(&folder);
    let (folder, sheet) = (folder.display().to_string(), picture.display().to_string());
    let found = object(&["data", "inspect", &folder, "--json"]);
    let sizes = &found["images"][0];
    assert_eq!(
        (&sizes["column"], &sizes["sampled"], &sizes["damaged"]),
        (&json!("image"), &json!(4), &json!(0))
    );
    assert_eq!(sizes["smallest"], json!([33, 3]));
    let said = succeed(["data", "inspect", &folder, "--contact-sheet", &sheet, "--images", "3"]);
    assert!(said.contains("4 images of `image` looked at") && said.contains("smallest 33 x 3"), "{said}");
    assert!(said.contains("sheet.png: 3 images"), "{said}");
    assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    let table = root().join("examples/tabular/clicks.parquet").display().to_string();
    let said = fail(["data", "inspect", &table, "--contact-sheet", &sheet]);
    assert!(said.contains("no column of images"), "{said}");
    let said = fail(["data", "inspect", &folder, "--contact-sheet", &sheet, "--label", "colour"]);
    assert!(said.contains("label `colour`: no such column; there are image, class"), "{said}");
}

#[test]
fn a_token_file_needs_to_know_how_it_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.bin");
    fs::write(&path, (0..9u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let file = path.display().to_string();
    assert!(fail(["data", "inspect", &file, "--format", "tokens"]).contains("add --token-type u16"));
    assert!(
        fail(["data", "inspect", &file, "--token-type", "u8", "--block", "4"])
            .contains("expected u16 or u32")
    );
    let said = succeed(["data", "inspect", &file, "--token-type", "u16", "--block", "4", "--records", "1"]);
    assert!(said.contains("tokens, 2 records") && said.contains("`labels` i32[4]"), "{said}");
    assert!(said.contains("record 0: tokens [0, 1, 2, 3], labels [1, 2, 3, 4]"), "{said}");
}
