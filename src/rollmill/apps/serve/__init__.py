"""A model or a run behind HTTP: OpenAI's, Anthropic's and the recording protocol, and what all web servers share."""

COMMANDS = {"serve": "rollmill.apps.serve.command:command"}
FUNCTIONS = {"serve": "rollmill.apps.serve.functions:serve"}
HOOKS = {"policy_server": "rollmill.apps.serve.endpoint.policy_endpoint:PolicyEndpoint"}
