"""Chat templates of families whose own ones no package has, or show no tools: written for the tests."""

from __future__ import annotations

from bench.chat_templates.corpus import ChatTemplate, template

INKLING = """
{%- macro message(role, kind, text, name='') -%}
<|message_{{ role }}|>{{ name }}<|content_{{ kind }}|>{{ text }}<|end_message|>
{%- endmacro -%}
{%- macro json(value) -%}
{%- if value is mapping -%}
{ {%- for key, each in value | dictsort(case_sensitive=true) -%}
{%- if not loop.first -%},{%- endif -%}{{ key | tojson }}:{{ json(each) }}
{%- endfor -%} }
{%- elif value is sequence and value is not string -%}
[ {%- for each in value -%}{%- if not loop.first -%},{%- endif -%}{{ json(each) }}{%- endfor -%} ]
{%- else -%}
{{ value | tojson }}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(effort=false) -%}
{%- set efforts = {'none': 0.0, 'minimal': 0.1, 'low': 0.2, 'medium': 0.7, 'high': 0.9, 'max': 0.99} -%}
{%- set number = efforts[reasoning_effort] if reasoning_effort is string else reasoning_effort | default(0.9) -%}
{%- set effort = message('system', 'text', 'Thinking effort level: ' ~ (number or 0)) -%}
{%- if tools -%}
{%- set ns.specs = [] -%}
{%- for tool in tools -%}
{%- set f = tool.function -%}
{%- set spec = {'description': f.description or '', 'name': f.name, 'parameters': f.parameters, 'type': tool.type} -%}
{%- set ns.specs = ns.specs + [spec] -%}
{%- endfor -%}
{{ message('system', 'xml', json(ns.specs), 'tool_declare') }}
{%- endif -%}
{%- for each in messages -%}
{%- if not ns.effort and each.role != 'system' -%}{{ effort }}{%- set ns.effort = true -%}{%- endif -%}
{%- if each.role == 'assistant' -%}
{%- if each.reasoning_content -%}{{ message('model', 'thinking', each.reasoning_content) }}{%- endif -%}
{%- if each.content is string -%}{{ message('model', 'text', each.content) }}{%- endif -%}
{%- for call in each.tool_calls or [] -%}
{%- set f = call.function -%}
{%- set text = '{"name":' ~ f.name | tojson ~ ',"args":' ~ json(f.arguments) ~ '}' -%}
{{ message('model', 'invoke_tool_json', text, f.name) }}
{%- endfor -%}
<|content_model_end_sampling|>
{%- elif each.role == 'tool' -%}
{{ message('tool', 'text', each.content, each.name or '') }}
{%- else -%}
{{ message(each.role, 'text', each.content) }}
{%- endif -%}
{%- endfor -%}
{%- if not ns.effort -%}{{ effort }}{%- endif -%}
{%- if add_generation_prompt -%}<|message_model|>{%- endif -%}
""".strip()
"""In the format of the library's renderer, see `test_the_written_template_of_inkling_is_the_librarys_rendering`."""

_TOOLS = "{% for tool in tools or [] %}{{ '\n\nYou may call this function: ' }}{{ tool | tojson }}{% endfor %}"


def written(name: str) -> ChatTemplate:
    """A written template by name, or one of the corpus. Raises KeyError."""
    if name == "inkling":
        return ChatTemplate(name, INKLING, "rollmill", "")
    if name == "deepseek-v3 with tools":  # DeepSeek's own template shows calls, and no tools
        own = template("xinference-deepseek-v3-0324")
        place = "{{ bos_token }}{{ ns.system_prompt }}"
        assert place in own.text
        return ChatTemplate(name, own.text.replace(place, f"{place}{_TOOLS}"), "rollmill", "")
    return template(name)
