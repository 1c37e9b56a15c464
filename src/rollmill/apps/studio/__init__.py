"""What people look at and answer to: reports, the local web application, feedback, the view of a notebook's cell."""

COMMANDS = {
    "ui": "rollmill.apps.studio.ui.command:command",
    "report": "rollmill.apps.studio.report.command:command",
    "feedback": "rollmill.apps.studio.feedback.command:command",
}
HOOKS = {
    "write_run_report": "rollmill.apps.studio.report.run_report:write_report",
    "write_bench_report": "rollmill.apps.studio.report.bench_report:write_bench_report",
    "notebook_view": "rollmill.apps.studio.notebook:NotebookView",
}
