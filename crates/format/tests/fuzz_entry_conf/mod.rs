//! What the fuzzers of the configuration's language call: any bytes, never a panic.

use lockstep_format::conf::model::{Address, Config, SourceFile};
use lockstep_format::conf::options::{self, Set};
use lockstep_format::conf::parse::{NoFiles, ParseOptions, parse, parse_show};
use lockstep_format::conf::resolve::{Node, add_names, inherit, resolve};
use lockstep_format::conf::{dump, dump_xml};

/// A file of the language: parsed, resolved for a node, dumped. What is printed of a valid file
/// is valid and prints the same.
pub(crate) fn file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    parse_show(text);
    let Some(mut config) = valid(text) else {
        return;
    };
    let printed = print(&config);
    let again = valid(&printed).expect("what is printed of a valid file is valid");
    assert_eq!(print(&again), printed);
    let node = Node {
        name: "alpha",
        has_address: &|_: &Address| true,
    };
    resolve(&mut config, &node);
    inherit(&mut config);
    for resource in &mut config.resources {
        add_names(resource);
        resource.my_connections();
    }
    print(&config);
    dump_xml::config(&config);
}

/// A value of every option: a value that is taken is taken again as it is printed.
pub(crate) fn value(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    for set in Set::ALL {
        for spec in options::all(set) {
            if let Ok(value) = spec.parse(text) {
                let printed = value.to_string();
                assert_eq!(spec.parse(&printed), Ok(value), "{}", spec.name);
            }
        }
    }
    options::nearest(text, options::all(Set::Net).iter().map(|spec| spec.name));
}

fn valid(text: &str) -> Option<Config> {
    let source = SourceFile {
        shown: "drbd.conf".into(),
        path: "/etc/drbd.conf".into(),
    };
    let files = [(source, text.to_owned())];
    let parsed = parse(&files, &mut NoFiles, &ParseOptions::default());
    parsed.is_valid().then_some(parsed.config)
}

fn print(config: &Config) -> String {
    let mut text = dump::head(config);
    for resource in &config.resources {
        text.push_str(&dump::resource(config, resource, "alpha"));
    }
    // Comments name the lines of the file that was read.
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect()
}
