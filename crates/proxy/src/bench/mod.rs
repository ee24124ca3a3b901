//! `lockstep proxy bench`: what the codecs give on this machine and this data, and what is left of
//! it on the whole path through two proxies on loopback. Figures are of one run; nothing is hidden.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::codec::{decode, encode};
use crate::core::frame::CHUNK_MAX;
use crate::core::plugin::{Choice, Plugin};
use crate::core::rng::Rng;
use crate::{Daemon, Options, Security, generate_secret, random_bytes};

const PLUGINS: [&str; 8] = [
    "none",
    "lz4",
    "zstd level 1",
    "zstd level 3",
    "zstd level 9",
    "zlib level 2",
    "lzma level 1",
    "auto",
];

/// Measures codecs alone and the whole path, with the bytes of `file` or made-up ones.
pub fn bench(file: Option<&Path>, bytes: u64) -> Result<String, String> {
    let len = usize::try_from(bytes.clamp(1 << 20, 4 << 30)).map_err(|error| error.to_string())?;
    let data = match file {
        Some(path) => read_sample(path, len)?,
        None => made_up(len),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut out = format!(
        "{} MiB of {}, chunks of 1 MiB, {cores} cores, TLS on the path\n\n\
         plugin          ratio   code MiB/s  decode MiB/s   path MiB/s  path/(code x cores)\n",
        data.len() >> 20,
        file.map_or("made-up data".into(), |path| path.display().to_string()),
    );
    let rate = |time: Duration| data.len() as f64 / 1048576.0 / time.as_secs_f64().max(1e-9);
    for name in PLUGINS {
        let words: Vec<&str> = name.split(' ').collect();
        let plugin = Plugin::parse(&words).map_err(|error| error.to_string())?;
        let path = whole_path(name, &data)?;
        let Choice::Fixed(spec) = plugin.choice else {
            let _ = writeln!(out, "{name:14} {:>48.0}", rate(path));
            continue;
        };
        let chunks: Vec<Arc<Vec<u8>>> = data
            .chunks(CHUNK_MAX)
            .map(|chunk| Arc::new(chunk.to_vec()))
            .collect();
        let begun = Instant::now();
        let coded: Vec<_> = chunks
            .iter()
            .map(|chunk| encode(&spec, chunk, &Vec::new()))
            .collect();
        let coding = rate(begun.elapsed());
        let wire: usize = coded.iter().map(|coded| coded.payload.len() + 32).sum();
        let begun = Instant::now();
        for (chunk, coded) in chunks.iter().zip(&coded) {
            let back = decode(
                coded.codec,
                chunk.len(),
                coded.crc,
                &coded.payload,
                &Vec::new(),
            );
            if back.as_ref() != Ok(chunk) {
                return Err(format!("{name} did not give back its input"));
            }
        }
        let decoding = rate(begun.elapsed());
        let _ = writeln!(
            out,
            "{name:14} {:>6.2} {coding:>12.0} {decoding:>13.0} {:>12.0} {:>20.2}",
            data.len() as f64 / wire as f64,
            rate(path),
            rate(path) / (coding * cores as f64)
        );
    }
    out.push_str(
        "\nThe path codes and decodes on the same cores here; on two machines each has its own.\n",
    );
    Ok(out)
}

fn read_sample(path: &Path, len: usize) -> Result<Vec<u8>, String> {
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut data = Vec::new();
    std::fs::File::open(path)
        .map_err(named)?
        .take(len as u64)
        .read_to_end(&mut data)
        .map_err(named)?;
    if data.is_empty() {
        return Err(format!("{} is empty", path.display()));
    }
    Ok(data)
}

/// Half text of small vocabulary, a quarter noise, a quarter zeros.
fn made_up(len: usize) -> Vec<u8> {
    let mut rng = Rng::new(42);
    let words: Vec<Vec<u8>> = (0..2000)
        .map(|_| {
            (0..2 + rng.below(9))
                .map(|_| b'a' + rng.below(26) as u8)
                .collect()
        })
        .collect();
    let mut data = Vec::with_capacity(len + (64 << 10));
    while data.len() < len {
        let end = data.len() + (16 << 10);
        match rng.below(4) {
            0 => data.extend((0..16 << 10).map(|_| rng.next() as u8)),
            1 => data.resize(end, 0),
            _ => {
                while data.len() < end {
                    data.extend_from_slice(&words[rng.below(2000) as usize]);
                    data.push(b' ');
                }
            }
        }
    }
    data.truncate(len);
    data
}

/// Time from the first byte into one proxy to the last byte out of the other.
fn whole_path(plugin: &str, data: &[u8]) -> Result<Duration, String> {
    let text = |error: std::io::Error| error.to_string();
    let security = Security::Secret(generate_secret()?.into_bytes());
    let options = || Options {
        security: security.clone(),
        ..Options::default()
    };
    let (a, b) = (Daemon::start(options())?, Daemon::start(options())?);
    // A loopback address of our own, so no port is taken.
    let [x, y, z, ..] = random_bytes()?;
    let ip = Ipv4Addr::new(127, 1 + x % 60, y, z.clamp(1, 254));
    let at = |port: u16| SocketAddr::from((ip, port));
    let drbd = TcpListener::bind(at(7915)).map_err(text)?;
    let drbd_b = drbd.local_addr().map_err(text)?;
    let (inside_a, out_a, inside_b, out_b, drbd_a) =
        (at(7816), at(7715), at(7817), at(7716), at(7914));
    let extra = "--memlimit=512M --max-lag=0";
    for (daemon, commands) in [
        (
            &b,
            [
                format!("add connection b {inside_b} {out_a} {out_b} {drbd_b} {extra}"),
                String::new(),
            ],
        ),
        (
            &a,
            [
                format!("add connection a {inside_a} {out_b} {out_a} {drbd_a} {extra}"),
                format!("set plugin a 0 {plugin}"),
            ],
        ),
    ] {
        for command in commands {
            daemon
                .commands(&[&command])
                .pop()
                .unwrap_or(Ok(String::new()))?;
        }
    }
    let end = Instant::now() + Duration::from_secs(20);
    while a.state()["connections"][0]["bulk_carriers"].as_u64() == Some(0) {
        if Instant::now() > end {
            return Err("the two proxies do not find each other".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut near = TcpStream::connect(inside_a).map_err(text)?;
    near.write_all(b"benchmrk").map_err(text)?;
    let (mut far, _) = drbd.accept().map_err(text)?;
    let mut first = [0; 8];
    far.read_exact(&mut first).map_err(text)?;
    let total = data.len();
    let begun = Instant::now();
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        let mut got = 0;
        while got < total {
            match far.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(count) => got += count,
            }
        }
        got
    });
    near.write_all(data).map_err(text)?;
    let got = reader.join().map_err(|_| "the reader failed".to_string())?;
    if got != total {
        return Err(format!("only {got} of {total} bytes came through"));
    }
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_benchmark_measures_every_plugin() {
        let text = super::bench(None, 1 << 20).unwrap();
        for plugin in super::PLUGINS {
            assert!(text.contains(plugin), "{text}");
        }
        assert!(super::bench(Some(std::path::Path::new("/nonexistent")), 1).is_err());
    }
}
