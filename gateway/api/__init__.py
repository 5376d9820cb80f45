"""What the HTTP API says, apart from who serves it. Life of a request's words here:

    body ─▶ json_body ─▶ openai_api (fields, types, ranges) ─▶ parsing (defaults, limits, chat template, token ids)
         ─▶ ParsedRequest ─▶ … the gateway has it served … ─▶ tokens
         ─▶ text (incremental detokenisation, stop strings)
         ─▶ chat_output (reasoning told apart, tool calls parsed)
         ─▶ responses (JSON bodies, server-sent events) ─▶ client

Everything that is wrong with a body leaves as an `errors.ApiError` that names the field. Nothing here knows of workers.
"""
