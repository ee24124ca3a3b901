//! `drbd-proxy-ctl`: takes commands as drbdadm sends them, as plain words, or from a terminal, and
//! passes them to the running proxy.

use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;

use lockstep_proxy::{Request, request};

use super::default_socket;

/// What the command line says.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    socket: PathBuf,
    json: bool,
    /// Empty: read commands from the terminal.
    commands: Vec<String>,
}

/// Runs the commands; 0 if all succeeded.
pub(super) fn run(args: &[String]) -> ExitCode {
    let asked = match parse(args) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("drbd-proxy-ctl: {error}");
            return ExitCode::from(2);
        }
    };
    if !asked.commands.is_empty() {
        return send(&asked, asked.commands.clone());
    }
    let mut last = ExitCode::SUCCESS;
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else {
            return ExitCode::FAILURE;
        };
        match line.trim() {
            "quit" | "exit" => break,
            "" => {}
            command => last = send(&asked, vec![command.into()]),
        }
    }
    last
}

fn send(asked: &Asked, commands: Vec<String>) -> ExitCode {
    let wanted = Request {
        commands,
        json: asked.json,
        ..Request::default()
    };
    let answers = match request(&asked.socket, &wanted) {
        Ok(answers) => answers,
        Err(error) => {
            eprintln!("drbd-proxy-ctl: {error}");
            return ExitCode::FAILURE;
        }
    };
    for answer in answers {
        if !answer.ok {
            eprintln!("drbd-proxy-ctl: {}", answer.text.trim_end());
            return ExitCode::FAILURE;
        }
        for line in answer.text.lines() {
            // What drbdadm reads must be the answer alone.
            if line.starts_with("note: ") {
                eprintln!("{line}");
            } else {
                println!("{line}");
            }
        }
    }
    ExitCode::SUCCESS
}

/// A word with a blank is a command, with or without `-c` before it; drbdadm 9.22 forgets some.
/// Words without blanks are one command together.
fn parse(args: &[String]) -> Result<Asked, String> {
    let mut asked = Asked {
        socket: default_socket(),
        json: false,
        commands: Vec::new(),
    };
    let mut single: Vec<&str> = Vec::new();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-c" | "--command" => {
                let command = words.next().ok_or("-c needs a command")?;
                asked.commands.push(command.clone());
            }
            "-s" | "--socket" => {
                asked.socket = words.next().ok_or("--socket needs a path")?.into();
            }
            "--json" => asked.json = true,
            command if command.trim().contains(' ') => asked.commands.push(command.into()),
            word => single.push(word),
        }
    }
    if !single.is_empty() {
        asked.commands.push(single.join(" "));
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(args: &[&str]) -> Vec<String> {
        let args: Vec<String> = args.iter().map(|word| (*word).into()).collect();
        parse(&args).unwrap().commands
    }

    #[test]
    fn commands_come_in_all_the_forms_that_drbdadm_uses() {
        let plugins = ["-c", "set plugin n 0 zlib level 9", "set plugin n 1 END"];
        assert_eq!(
            commands(&plugins),
            ["set plugin n 0 zlib level 9", "set plugin n 1 END"]
        );
        assert_eq!(commands(&["-c", "show"]), ["show"]);
        assert_eq!(
            commands(&["show", "connections", "--json"]),
            ["show connections"]
        );
        assert_eq!(
            commands(&[
                "add",
                "connection",
                "r0",
                "a",
                "b",
                "c",
                "d",
                "--memlimit=1G"
            ]),
            ["add connection r0 a b c d --memlimit=1G"]
        );
        assert!(commands(&[]).is_empty());
        assert!(parse(&["-c".to_string()]).is_err());
    }
}
