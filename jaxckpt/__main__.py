"""`python -m jaxckpt` is the command `jaxckpt`."""

from jaxckpt._cli import main

main()
