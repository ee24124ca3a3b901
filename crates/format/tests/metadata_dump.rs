//! Every dump of the metadata vectors: printed from the image byte for byte, and parsed back to
//! the same superblock and bitmap.

mod metadata_vectors;

use lockstep_format::disk::any::{AnySuperBlock, Format};
use lockstep_format::disk::bitmap::Piece;
use lockstep_format::disk::dump::{self, Members, WordPrinter};
use lockstep_format::disk::layout::Layout;
use lockstep_format::units::Sector;
use metadata_vectors::{Image, Vector, all, text};

struct Loaded {
    superblock: AnySuperBlock,
    layout: Layout,
    image: Image,
}

fn load(vector: &Vector, suffix: &str) -> Loaded {
    let image = vector.image(suffix);
    let block = image.block(vector.number("md_offset") as u64);
    let superblock = AnySuperBlock::decode(&block).unwrap();
    let layout = superblock
        .layout(vector.placement(), vector.file_size())
        .unwrap();
    Loaded {
        superblock,
        layout,
        image,
    }
}

/// Dumps of final images; those of `pre` images are made with very verbose options.
fn dumps() -> impl Iterator<Item = (Vector, String)> {
    all().into_iter().flat_map(|vector| {
        let json = vector.json.clone();
        let dumps = vector.files().into_iter().filter(|f| f.ends_with(".dump"));
        let files: Vec<String> = dumps.map(String::from).collect();
        files
            .into_iter()
            .map(move |file| (Vector { json: json.clone() }, file))
    })
}

fn print(loaded: &mut Loaded, members: Members, verbose: bool) -> String {
    let layout = loaded.layout;
    let usable = Sector(layout.tool_usable_sectors());
    let mut out = String::new();
    if loaded.superblock.effective_size() > usable {
        let found = loaded.superblock.effective_size();
        out += &format!("# la-size-sect was too big ({found}), truncated ({usable})!\n");
        *loaded.superblock.effective_size_mut() = usable;
    }
    out += "# DRBD meta data dump\n# DATE\n# HOST\n#\n\n";
    out += &dump::print_head(&loaded.superblock, &dump::place_comment(&layout), members);
    let shape = layout.bitmap_shape(loaded.superblock.effective_size().0);
    out += &format!("# bm-bytes {};\n", shape.area_bytes());
    let area = loaded
        .image
        .read(layout.bitmap_byte(), shape.area_bytes() as usize);
    let piece = Piece::new(&shape, 0, &area[..]);
    let mut bits_set = 0;
    for slot in 0..shape.slots() {
        match loaded.superblock.format() {
            Format::V08 => out += "bm {\n",
            Format::V09 => out += &format!("bitmap[{slot}] {{\n"),
        }
        let mut printer = WordPrinter::new(shape.slots());
        for k in 0..dump::words_of_slot(shape.area_bytes(), shape.slots(), slot) {
            let word = |i| u64::from(piece.word(slot, i).unwrap());
            printer.push(word(2 * k) | word(2 * k + 1) << 32, &mut out);
        }
        bits_set = printer.finish(&mut out);
        out += "}\n";
    }
    out += &format!("# bits-set {bits_set};\n");
    if verbose {
        let al = layout.geometry().al;
        let ring = loaded.image.read(layout.al_byte(), al.bytes() as usize);
        let form = lockstep_format::disk::al::AlForm::of(&ring, al, false);
        out += &dump::print_al(&ring, al, loaded.superblock.al_extents(), form);
    }
    out
}

/// The comment with the command line is the tool's business.
fn without_command(text: &str) -> String {
    let cut = |line: &str| {
        if line.starts_with("# HOST>") {
            "# HOST".to_owned()
        } else {
            line.to_owned()
        }
    };
    text.lines().map(cut).collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn dumps_are_printed_byte_for_byte() {
    let mut count = 0;
    for (vector, file) in dumps() {
        let verbose = file.contains(".pre.");
        let mut loaded = load(&vector, if verbose { ".pre.hex" } else { ".hex" });
        let expected = without_command(&text(&file));
        let newer = expected.contains("\nmembers ");
        let members = if newer {
            Members::Print
        } else {
            Members::Leave
        };
        let printed = print(&mut loaded, members, verbose);
        if printed != expected {
            let differs = printed.lines().zip(expected.lines()).find(|(a, b)| a != b);
            panic!("{file}: printed and expected: {differs:#?}");
        }
        count += 1;
    }
    assert!(count > 120, "{count}");
}

#[test]
fn parsed_dumps_hold_what_the_image_holds() {
    let mut count = 0;
    for (vector, file) in dumps().filter(|(_, file)| !file.contains(".pre.")) {
        let mut loaded = load(&vector, ".hex");
        if !loaded.superblock.is_clean() {
            assert!(dump::parse(&text(&file)).is_err(), "{file}: unclean");
            continue;
        }
        let parsed = dump::parse(&text(&file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert_eq!(
            dump::version(&text(&file)).unwrap(),
            loaded.superblock.format().name(),
            "{file}"
        );
        let usable = Sector(loaded.layout.tool_usable_sectors());
        let size = loaded.superblock.effective_size_mut();
        *size = usable.min(*size);
        let mut superblock = parsed.superblock.clone();
        superblock.set_layout(&loaded.layout);
        // Not in the text.
        match (&mut superblock, &loaded.superblock) {
            (AnySuperBlock::V08(new), AnySuperBlock::V08(old)) => new.al_extents = old.al_extents,
            (AnySuperBlock::V09(new), AnySuperBlock::V09(old)) => new.al_extents = old.al_extents,
            _ => panic!("{file}: formats differ"),
        }
        assert_eq!(superblock, loaded.superblock, "{file}");
        let shape = loaded
            .layout
            .bitmap_shape(loaded.superblock.effective_size().0);
        let mut area = vec![0u8; shape.area_bytes() as usize];
        let mut piece = Piece::new(&shape, 0, &mut area[..]);
        for (slot, runs) in (0u8..).zip(&parsed.bitmap) {
            let words = runs
                .iter()
                .flat_map(|(n, word)| (0..*n).map(move |_| *word));
            for (k, word) in (0u64..).zip(words) {
                assert!(piece.set_word(slot, 2 * k, word as u32), "{file}");
                assert!(
                    piece.set_word(slot, 2 * k + 1, (word >> 32) as u32),
                    "{file}"
                );
            }
        }
        let on_disk = loaded.image.read(loaded.layout.bitmap_byte(), area.len());
        assert!(area == on_disk, "{file}");
        count += 1;
    }
    assert!(count > 100, "{count}");
}

#[test]
fn v08_superblocks_are_read_and_written_byte_for_byte() {
    let mut count = 0;
    for vector in all().into_iter().filter(|v| v.format() == "v08") {
        for (file, image) in vector.images() {
            let block = image.block(vector.number("md_offset") as u64);
            let read = AnySuperBlock::decode(&block).unwrap();
            let mut written = [0x77; 4096];
            read.encode(&mut written);
            assert!(written == block, "{file}");
            read.layout(vector.placement(), vector.file_size()).unwrap();
            let AnySuperBlock::V08(read) = read else {
                continue;
            }; // Before a conversion.
            if !file.contains(".pre.") {
                let number = |key| vector.number(key);
                assert_eq!(i64::from(read.flags.bits()), number("flags"), "{file}");
                assert_eq!(
                    read.effective_size.0 as i64,
                    number("effective_size_sect"),
                    "{file}"
                );
                let magic = if read.magic_84_unclean {
                    0x8374_026c
                } else {
                    0x8374_026b
                };
                assert_eq!(magic, number("magic"), "{file}");
            }
            count += 1;
        }
    }
    assert!(count >= 14, "{count}");
}

#[test]
fn conversion_to_v09_gives_the_original_superblock_with_the_bitmap_uuid_kept() {
    let vector = all()
        .into_iter()
        .find(|v| v.name() == "v500-conv-08-09")
        .unwrap();
    let place = vector.number("md_offset") as u64;
    let AnySuperBlock::V08(old) =
        AnySuperBlock::decode(&vector.image(".pre.hex").block(place)).unwrap()
    else {
        panic!("the image before is v08");
    };
    let AnySuperBlock::V09(mut expected) =
        AnySuperBlock::decode(&vector.image(".hex").block(place)).unwrap()
    else {
        panic!("the image after is v09");
    };
    assert!(expected.peers.iter().all(|peer| peer.bitmap_uuid.is_zero()));
    for peer in &mut expected.peers {
        peer.bitmap_uuid = old.bitmap_uuid;
    }
    assert_eq!(old.to_v09(), expected);
}

#[test]
fn parse_errors_are_worded_as_the_original_does() {
    let error = |text: &str| dump::parse(text).unwrap_err().to_string();
    assert_eq!(
        error("version \"v09\";\nmax-peers x;\n"),
        "line 2: unknown token: x ...\n\
         Parse error in line 2: number ([0-9], up to 20 digits) expected"
    );
    assert_eq!(
        error("version \"v09\";\n\nThis_is_an_unclean_meta_data_dump._Don't_trust_the_bitmap.\n"),
        "line 3: unknown token: This_is_an_unclean_meta_data_dump ...\n\
         Parse error in line 3: keyword 'max-peers' expected"
    );
    let good = text("c100-v09-int-64m-p1.dump");
    for (from, to) in [
        ("max-peers 1;", "max-peers 32;"),
        ("node-id -1;", "node-id 32;"),
        ("peer[7]", "peer[6]"),
        ("la-size-sect 0;", "la-size-sect 9999999999999;"),
        ("bm-byte-per-bit 4096;", "bm-byte-per-bit 12288;"),
        ("al-stripe-size-4k 8;", "al-stripe-size-4k 7;"),
        ("bitmap[0]", "bitmap[1]"),
        ("# bits-set 0;", "surplus"),
    ] {
        assert!(good.contains(from));
        assert!(dump::parse(&good.replace(from, to)).is_err(), "{to}");
    }
}
