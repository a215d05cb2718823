"""The commands of the command line, one file each; none imports torch before it runs."""
