"""The command `tread-zoo`: each script by name, from a clone or an installed wheel.

tread-zoo train backbone=mamba routing=tread
accelerate launch -m tread_zoo train backbone=mamba     # where a launcher wants a module
eval "$(tread-zoo --shell-completion)"                  # bash; zsh after bashcompinit
"""

import ast
import runpy
import sys

from tread_zoo.cli import CONFIGS, SCRIPTS, errors_in_one_line
from tread_zoo.errors import unknown_name
from tread_zoo.version import __version__

COMMANDS = {  # command -> script, in the order of the help
    "train": "train",
    "resume": "resume",
    "sample": "sample",
    "demo": "demo",
    "evaluate": "evaluate",
    "compare": "compare",
    "encode": "encode",
    "import": "import_checkpoint",
    "push": "push",
    "list": "list",
    "doctor": "doctor",
    "make-features": "make_features",
    "make-reference": "make_reference",
}
# hydra completes the words after a command; its own bash function supports no commands.
COMPLETION = """
_tread_zoo() {
  local word="${COMP_WORDS[COMP_CWORD]}" choices="COMMANDS"
  if [ "$COMP_CWORD" -gt 1 ]; then
    choices=$(COMP_LINE="${COMP_LINE#* }" tread-zoo "${COMP_WORDS[1]}" -sc query=bash 2> /dev/null)
  fi
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _tread_zoo tread-zoo
""".replace("COMMANDS", " ".join(COMMANDS))


def main() -> None:
    """Run the script that the first word of the command line names; the other words are its
    arguments."""
    name, *words = sys.argv[1:] or ["--help"]
    texts = {"--version": __version__, "--shell-completion": COMPLETION}
    if name in ("-h", "--help", *texts):
        with errors_in_one_line():
            print(texts.get(name) or overview())
    elif name in COMMANDS:
        sys.argv[1:] = words
        runpy.run_path(str(SCRIPTS / f"{COMMANDS[name]}.py"), run_name="__main__")
    else:
        sys.exit(f"error: {unknown_name('command', name, COMMANDS)}")


def overview() -> str:
    """Return a text that says what each command does and where the presets are."""
    lines = ["tread-zoo COMMAND [field=value ...]; tread-zoo COMMAND --help says more.", ""]
    for name, script in COMMANDS.items():
        module = ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8"))
        lines.append(f"  {name:17s}{(ast.get_docstring(module) or '').partition(chr(10))[0]}")
    lines += ["", f"presets (experiment=, compare.study=, accelerate): {CONFIGS}"]
    lines += ['completion in bash: eval "$(tread-zoo --shell-completion)"']
    return "\n".join(lines)


if __name__ == "__main__":
    main()
