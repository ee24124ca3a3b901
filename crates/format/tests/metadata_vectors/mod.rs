//! Reads the metadata vectors of `testdata/metadata`: index, sparse images, checksums.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lockstep_format::disk::layout::Placement;
use serde_json::Value;

/// Directory of the vectors.
pub(crate) fn directory() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/metadata"
    ))
}

/// The text of one file of the directory.
pub(crate) fn text(name: &str) -> String {
    let path = directory().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// One entry of `index.json`.
pub(crate) struct Vector {
    /// All fields.
    pub(crate) json: Value,
}

/// All vectors.
pub(crate) fn all() -> Vec<Vector> {
    let index: Value = serde_json::from_str(&text("index.json")).unwrap();
    let list = index["vectors"].as_array().unwrap();
    assert!(list.len() > 100, "the index is complete");
    list.iter()
        .map(|json| Vector { json: json.clone() })
        .collect()
}

#[allow(dead_code)]
impl Vector {
    pub(crate) fn name(&self) -> &str {
        self.json["name"].as_str().unwrap()
    }

    pub(crate) fn format(&self) -> &str {
        self.json["format"].as_str().unwrap()
    }

    pub(crate) fn number(&self, key: &str) -> i64 {
        let value = &self.json[key];
        match value.as_str() {
            Some(hex) => i64::from_str_radix(hex.trim_start_matches("0x"), 16).unwrap(),
            None => value
                .as_i64()
                .unwrap_or_else(|| panic!("{}: {key}", self.name())),
        }
    }

    pub(crate) fn file_size(&self) -> u64 {
        self.number("file_size") as u64
    }

    pub(crate) fn placement(&self) -> Placement {
        match self.json["index"].as_str().unwrap() {
            "internal" => Placement::Internal,
            "flex-external" => Placement::FlexExternal,
            slot => Placement::Indexed(slot.parse().unwrap()),
        }
    }

    pub(crate) fn files(&self) -> Vec<&str> {
        self.json["files"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f.as_str().unwrap())
            .collect()
    }

    /// Images of this vector by suffix (`.hex`, `.pre.hex`), as far as they exist.
    pub(crate) fn images(&self) -> Vec<(String, Image)> {
        self.files()
            .into_iter()
            .filter(|file| file.ends_with(".hex"))
            .map(|file| (file.to_owned(), Image::parse(&text(file))))
            .collect()
    }

    pub(crate) fn image(&self, suffix: &str) -> Image {
        Image::parse(&text(&format!("{}{suffix}", self.name())))
    }
}

/// A sparse image: 4 KiB pages that hold something.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) size: u64,
    pages: BTreeMap<u64, Box<[u8; 4096]>>,
}

#[allow(dead_code)]
impl Image {
    pub(crate) fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let size = lines
            .next()
            .unwrap()
            .strip_prefix("size ")
            .unwrap()
            .parse()
            .unwrap();
        let mut image = Self {
            size,
            pages: BTreeMap::new(),
        };
        for line in lines {
            let (place, hex) = line.split_once(": ").unwrap();
            let (offset, count) = place.split_once(" x").unwrap_or((place, "1"));
            let offset = u64::from_str_radix(offset, 16).unwrap();
            let row: Vec<u8> = (0..hex.len() / 2)
                .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
                .collect();
            for k in 0..count.parse::<u64>().unwrap() {
                image.write(offset + k * 32, &row);
            }
        }
        image
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.write_pages(offset, bytes);
    }

    /// Writes much at once; faster than [`Image::write`].
    pub(crate) fn write_pages(&mut self, offset: u64, bytes: &[u8]) {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let start = (at % 4096) as usize;
            let len = rest.len().min(4096 - start);
            let page = self
                .pages
                .entry(at / 4096)
                .or_insert_with(|| Box::new([0; 4096]));
            page[start..start + len].copy_from_slice(&rest[..len]);
            if page.iter().all(|b| *b == 0) {
                self.pages.remove(&(at / 4096));
            }
            at += len as u64;
            rest = &rest[len..];
        }
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        for (number, page) in self
            .pages
            .range(offset / 4096..=(offset + len as u64) / 4096)
        {
            for (i, byte) in page.iter().enumerate() {
                let at = number * 4096 + i as u64;
                if at >= offset && at < offset + len as u64 {
                    out[(at - offset) as usize] = *byte;
                }
            }
        }
        out
    }

    pub(crate) fn block(&self, offset: u64) -> [u8; 4096] {
        self.read(offset, 4096).try_into().unwrap()
    }

    /// Pages that hold something, with their byte offsets.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, &[u8; 4096])> {
        self.pages
            .iter()
            .map(|(number, page)| (number * 4096, &**page))
    }

    /// `sha256_nonzero_blocks` of the index.
    pub(crate) fn checksum(&self) -> String {
        use sha2::Digest;
        let mut sha = sha2::Sha256::new();
        for (offset, page) in self.pages() {
            sha.update(offset.to_be_bytes());
            sha.update(page);
        }
        sha.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }

    /// First difference to another image, as text.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        if self.size != other.size {
            return Some(format!("sizes {} and {}", self.size, other.size));
        }
        let numbers = self.pages.keys().chain(other.pages.keys());
        numbers
            .copied()
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .find_map(|n| {
                let (a, b) = (self.block(n * 4096), other.block(n * 4096));
                let i = (0..4096).find(|i| a[*i] != b[*i])?;
                Some(format!(
                    "byte {:#x}: {:02x} and {:02x}",
                    n * 4096 + i as u64,
                    a[i],
                    b[i]
                ))
            })
    }
}
