"""Chat templates with tools, in the shape of those that models have, only shorter."""

#: Qwen and Hermes: calls in tags, results as a user's message; thoughts, where they are wanted.
HERMES = """{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\\n' + messages[0].content }}{% endif %}
# Tools
<tools>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools>
Return calls as <tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call><|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if thinks %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
#: As :data:`HERMES`, of a model that always thinks first.
THINKING = HERMES.replace("{%- if thinks %}", "{%- if '</think>' %}")
#: Llama 3.1 and later: one call a message, arguments as parameters.
LLAMA = """{{- bos_token }}
{%- if not tools is none %}{{ 'Environment: ipython\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>' + message.content + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{ raise_exception('only one at once!') }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>{"name": "' + tool_call.name + '", ' }}
{{- '"parameters": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>' }}{{ message.content | tojson }}
{{- '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""
#: Mistral up to v7: calls in a list, ids of nine characters.
MISTRAL = """{{- bos_token }}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == user_messages[-1] %}
{{- '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}{%- set tool = tool.function %}{{ '{"type": "function", "function": {' }}
{%- for key, val in tool.items() %}{{ '"' + key + '": ' }}{{ val | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}{{ '}}' }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}
{%- endif %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS][' }}
{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{ out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{% if not loop.last %}, {% endif %}{% endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
#: gpt-oss: channels, one call a message, thoughts kept beside calls.
HARMONY = """{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') }}
{{- '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
{%- for tool in tools %}{%- set tool = tool.function %}
{{- '\\n// ' + tool.description + '\\ntype ' + tool.name + ' = (_: ' }}
{{- tool.parameters.properties | tojson }}{{ ') => any;' }}{% endfor %}{{ '}<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- set tool_call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{ raise_exception('not both!') }}
{%- elif message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}
{{- tool_call.arguments | tojson }}{{ '<|call|>' }}{% set last.name = tool_call.name %}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{ '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
#: One that writes arguments as they are: only texts will do, and content has to be none.
TEXTS = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.content is none %}
{%- for call in message.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments + '}</tool_call>' }}{% endfor %}
{%- else %}{{ message.role + ': ' + message.content + '\\n' }}{% endif %}{% endfor %}"""

#: Qwen3-Coder: each argument in a tag of its own.
QWEN3_CODER = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
Call <function=name> with <parameter=key>.<|im_end|>
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or () %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value | string) + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
#: DeepSeek V3.1: arguments as they were, content is none beside calls.
DEEPSEEK = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content }}
{%- elif message.tool_calls %}
{{- '<｜Assistant｜></think>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- else %}{{ '<｜Assistant｜></think>' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>' }}{% endif %}"""

ALL = {
    "hermes": HERMES,
    "thinking": THINKING,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "texts": TEXTS,
}
#: Special tokens of such models.
SPECIAL = (
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>"),
    *("<|constrain|>", "<|call|>", "<|return|>"),
)
