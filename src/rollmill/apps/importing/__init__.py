"""Run files from configuration files of TRL, verl and Trinity-RFT, and from run files with former names."""

COMMANDS = {"import-config": "rollmill.apps.importing.command:command"}
