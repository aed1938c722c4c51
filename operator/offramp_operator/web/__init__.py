"""The web page: what the commands print, drawn. Read-only, rendered on the server, live.

curves.py    a rollout's evidence over time, in bounded memory
board.py     the last pass of every service, and who waits for the next
pages.py     what each page shows, as values (pure); its JSON is the API
charts.py    values to SVG (pure)
render.py    values to HTML: templates/ and static/
live.py      sections that changed, sent as they change
relay.py     what a standby does with a question
guard.py     who may ask: methods, Host, headers
server.py    the routes
"""
