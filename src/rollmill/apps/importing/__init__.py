"""Run files from configuration files of TRL, verl and Trinity-RFT."""

COMMANDS = {"import-config": "rollmill.apps.importing.command:command"}
