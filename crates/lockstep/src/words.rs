//! Shell completions and manual pages, made from the tables of commands and options.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use lockstep_format::conf::options::{self, OptionSpec, Set};

use crate::{COMMANDS, drbdadm, drbdmeta, drbdsetup};

const USAGE: &str = "\
Usage: lockstep completions bash|zsh|fish   prints completions of all tools
       lockstep man DIRECTORY               writes manual pages there";

/// A tool as completions and pages know it.
struct Tool {
    name: &'static str,
    summary: &'static str,
    commands: Vec<Command>,
}

/// One command of a tool.
pub(crate) struct Command {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it does; may be empty.
    pub(crate) summary: String,
    /// Its options, without the dashes.
    pub(crate) options: Vec<&'static str>,
}

fn tools() -> Vec<Tool> {
    let own = COMMANDS
        .iter()
        .map(|(name, summary)| Command {
            name,
            summary: (*summary).to_owned(),
            options: Vec::new(),
        })
        .collect();
    vec![
        Tool {
            name: "lockstep",
            summary: "replicated block devices in userspace",
            commands: own,
        },
        Tool {
            name: "drbdadm",
            summary: "brings resources to the state of the configuration",
            commands: drbdadm::words(),
        },
        Tool {
            name: "drbdsetup",
            summary: "changes and shows the state of a node's resources",
            commands: drbdsetup::words(),
        },
        Tool {
            name: "drbdmeta",
            summary: "makes, shows and changes metadata on disks that are not in use",
            commands: drbdmeta::words(),
        },
    ]
}

/// Runs `lockstep completions` or `lockstep man`.
pub(crate) fn run(command: &str, args: &[String]) -> ExitCode {
    let done = match (command, args) {
        ("completions", [shell]) => completions(shell).map(|text| print!("{text}")),
        ("man", [directory]) if !directory.starts_with('-') => write_pages(Path::new(directory)),
        _ => Err("say which".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("lockstep {command}: {problem}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn completions(shell: &str) -> Result<String, String> {
    let tools = tools();
    match shell {
        "bash" => Ok(bash(&tools)),
        // The shell understands the other one's completions.
        "zsh" => Ok(format!(
            "autoload -U +X bashcompinit && bashcompinit\n{}",
            bash(&tools)
        )),
        "fish" => Ok(fish(&tools)),
        other => Err(format!("no completions for '{other}'")),
    }
}

fn bash(tools: &[Tool]) -> String {
    let mut out =
        String::from("# Completions of Lockstep's tools; made by `lockstep completions`.\n");
    for tool in tools {
        let names: Vec<&str> = tool.commands.iter().map(|c| c.name).collect();
        let _ = write!(
            out,
            "_{name}_words() {{\n    local word=${{COMP_WORDS[COMP_CWORD]}} command= w\n    \
             for w in \"${{COMP_WORDS[@]:1:COMP_CWORD-1}}\"; do\n        \
             case $w in -*) ;; *) command=$w; break ;; esac\n    done\n    local words=\n    \
             case $command in\n        '') words='{}' ;;\n",
            names.join(" "),
            name = tool.name
        );
        for command in tool.commands.iter().filter(|c| !c.options.is_empty()) {
            let options: Vec<String> = command.options.iter().map(|o| format!("--{o}=")).collect();
            let _ = writeln!(
                out,
                "        {}) words='{}' ;;",
                command.name,
                options.join(" ")
            );
        }
        let _ = write!(
            out,
            "    esac\n    if [[ $command && $word != -* ]]; then\n        \
             words+=\" $(drbdadm sh-resources 2>/dev/null) all\"\n    fi\n    \
             COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n    \
             [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace\n    return 0\n}}\n\
             complete -F _{name}_words {name}\n",
            name = tool.name
        );
    }
    out
}

fn fish(tools: &[Tool]) -> String {
    let mut out =
        String::from("# Completions of Lockstep's tools; made by `lockstep completions`.\n");
    for tool in tools {
        let name = tool.name;
        let _ = writeln!(out, "complete -c {name} -f");
        for command in &tool.commands {
            let summary = command.summary.replace('\'', "\\'");
            let _ = writeln!(
                out,
                "complete -c {name} -n __fish_use_subcommand -a {} -d '{summary}'",
                command.name
            );
            for option in &command.options {
                let _ = writeln!(
                    out,
                    "complete -c {name} -n '__fish_seen_subcommand_from {}' -l {option}",
                    command.name
                );
            }
        }
    }
    out
}

fn write_pages(directory: &Path) -> Result<(), String> {
    std::fs::create_dir_all(directory)
        .map_err(|error| format!("{}: {error}", directory.display()))?;
    let mut pages: Vec<(String, String)> = tools()
        .iter()
        .map(|tool| {
            // Names of their own: drbd-utils has pages of the plain names.
            let name = match tool.name {
                "lockstep" => "lockstep".to_owned(),
                other => format!("lockstep-{other}"),
            };
            let page = tool_page(&name, tool);
            (format!("{name}.8"), page)
        })
        .collect();
    pages.push(("lockstep-drbd.conf.5".to_owned(), options_page()));
    for (name, page) in pages {
        let path = directory.join(name);
        std::fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Text that the formatter leaves alone.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

fn tool_page(name: &str, tool: &Tool) -> String {
    let mut out = format!(
        ".TH {} 8 \"\" \"Lockstep {}\"\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n.B {}\nCOMMAND \
         [OPTION...] [ARGUMENT...]\n.SH COMMANDS\n",
        name.to_uppercase(),
        env!("CARGO_PKG_VERSION"),
        roff(name),
        roff(tool.summary),
        roff(tool.name)
    );
    for command in &tool.commands {
        let _ = writeln!(out, ".TP\n.B {}", roff(command.name));
        if !command.summary.is_empty() {
            let _ = writeln!(out, "{}", roff(&command.summary));
        }
        if !command.options.is_empty() {
            let options: Vec<String> = command.options.iter().map(|o| format!("--{o}")).collect();
            let _ = writeln!(out, ".br\nOptions: {}", roff(&options.join(" ")));
        }
    }
    out.push_str(".SH SEE ALSO\n.BR lockstep (8),\n.BR lockstep\\-drbd.conf (5)\n");
    out
}

fn options_page() -> String {
    let mut out = format!(
        ".TH LOCKSTEP\\-DRBD.CONF 5 \"\" \"Lockstep {}\"\n.SH NAME\nlockstep\\-drbd.conf \\- \
         options of drbd.conf\n",
        env!("CARGO_PKG_VERSION")
    );
    for set in Set::ALL {
        let _ = writeln!(out, ".SH SECTION {}", roff(&set.section().to_uppercase()));
        for spec in options::all(set) {
            out.push_str(&option_entry(spec));
        }
    }
    out
}

fn option_entry(spec: &OptionSpec) -> String {
    let mut facts = vec![spec.allowed()];
    if !spec.unit().is_empty() {
        facts.push(format!("unit {}", spec.unit()));
    }
    facts.push(format!("default {}", spec.default().show()));
    if !spec.since.is_empty() {
        facts.push(format!("since {}", spec.since));
    }
    format!(
        ".TP\n.B {}\n{}\n.br\n{}\n",
        roff(spec.name),
        roff(spec.help),
        roff(&facts.join("; "))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_know_the_commands_and_options_of_the_tables() {
        let text = bash(&tools());
        assert!(text.contains("complete -F _drbdsetup_words drbdsetup\n"));
        assert!(text.contains("net-options) words='"), "{text}");
        assert!(text.contains("--verify-alg="), "{text}");
        assert!(text.contains(" explain "), "{text}");
        let fish = fish(&tools());
        assert!(fish.contains("__fish_seen_subcommand_from attach' -l al-extents\n"));
    }

    #[test]
    fn pages_name_every_option_with_range_and_default() {
        let page = options_page();
        for set in Set::ALL {
            for spec in options::all(set) {
                assert!(
                    page.contains(&format!(".B {}\n", roff(spec.name))),
                    "{}",
                    spec.name
                );
            }
        }
        assert!(!page.lines().any(|line| line.starts_with('\'')));
        let dir = tempfile::tempdir().unwrap();
        write_pages(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 5);
    }
}
