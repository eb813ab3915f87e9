"""Completions for bash, zsh and fish: static files made from the tree of programs.

Static, because a program that is asked at every Tab answers after the half second that Python takes to start.
"""

from __future__ import annotations

from programs import Option, Program

_HEADING = "# Completion of {name}. Generated from the program's own options.\n"


def _words(program: Program) -> str:
    options = [name for option in program.options for name in option.names]
    return " ".join([*(command.name for command in program.commands), *options])


def _valued(program: Program, files: bool) -> list[str]:
    everywhere = [program, *(command for _, command in program.walk())]
    options = [option for one in everywhere for option in one.options if option.value and option.files == files]
    return sorted({name for option in options for name in option.names})


def _takes_files(program: Program) -> bool:
    return any(argument.files for argument in program.arguments)


def bash(program: Program) -> str:
    """One function: the command is the words that name one, values of path options and arguments are files."""
    function = "_" + program.name.replace("-", "_")
    rows = [("", program), *program.walk()]
    cases = "\n".join(f'    "{words}") words="{_words(one)}" files={int(_takes_files(one))} ;;' for words, one in rows)
    known = "|".join(f'"{words}"' for words, _ in program.walk()) or '"(none)"'
    with_files, with_text = _valued(program, True), _valued(program, False)
    return f"""{_HEADING.format(name=program.name)}\
{function}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command="" words="" files=0 word
    case $previous in
    {"|".join(with_files) or "(none)"}) COMPREPLY=($(compgen -f -- "$current")); return ;;
    {"|".join(with_text) or "(none)"}) return ;;
    esac
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "${{command:+$command }}$word" in
        {known}) command="${{command:+$command }}$word" ;;
        esac
    done
    case $command in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ "$files" = 1 ] && [[ $current != -* ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F {function} {program.name}
"""


def _zsh_quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "'\\''").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def _zsh_option(option: Option) -> list[str]:
    value = f":{option.value.lower()}:{'_files' if option.files else ''}" if option.value else ""
    about = _zsh_quoted(option.about)
    return [f"'{name}{'=' if value else ''}[{about}]{value}'" for name in option.names]


def _zsh_function(name: str, program: Program) -> str:
    words = [word for option in program.options for word in _zsh_option(option)]
    if not program.commands:
        words += [
            f"'*:{_zsh_quoted(one.name.lower())}:{'_files' if one.files else ''}'" for one in program.arguments[:1]
        ]
        return f"{name}() {{\n    _arguments \\\n        " + " \\\n        ".join(words) + "\n}\n"
    about = "\n".join(f"        '{one.name}:{_zsh_quoted(one.about)}'" for one in program.commands)
    cases = "\n".join(f"        {one.name}) {name}_{one.name.replace('-', '_')} ;;" for one in program.commands)
    arguments = " \\\n        ".join(["-C", *words, "'1: :->command'", "'*:: :->rest'"])
    own = f"""{name}() {{
    local state line
    local -a commands
    commands=(
{about}
    )
    _arguments \\
        {arguments}
    case $state in
    command) _describe command commands ;;
    rest)
        case $line[1] in
{cases}
        esac ;;
    esac
}}
"""
    return own + "".join(_zsh_function(f"{name}_{one.name.replace('-', '_')}", one) for one in program.commands)


def zsh(program: Program) -> str:
    name = "_" + program.name.replace("-", "_")
    return f'#compdef {program.name}\n{_HEADING.format(name=program.name)}{_zsh_function(name, program)}{name} "$@"\n'


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def fish(program: Program) -> str:
    """Commands where no command was given yet, options where their command was."""
    lines = [_HEADING.format(name=program.name).rstrip()]
    if not _takes_files(program):
        lines.append(f"complete -c {program.name} -f")
    for words, one in [("", program), *program.walk()]:
        inner = " ".join(command.name for command in one.commands)
        seen = [f"__fish_seen_subcommand_from {word}" for word in words.split()]
        none = [f"not __fish_seen_subcommand_from {inner}"] if inner else []
        condition = f" -n {_fish_quoted('; and '.join([*seen, *none]))}" if seen or none else ""
        for command in one.commands:
            lines.append(f"complete -c {program.name}{condition} -a {command.name} -d {_fish_quoted(command.about)}")
        for option in one.options:
            names = " ".join(f"-l {name.removeprefix('--')}" for name in option.names)
            value = (" -r -F" if option.files else " -x") if option.value else ""
            lines.append(f"complete -c {program.name}{condition} {names}{value} -d {_fish_quoted(option.about)}")
        if words and _takes_files(one):
            lines.append(f"complete -c {program.name}{condition} -F")
    return "\n".join(lines) + "\n"
