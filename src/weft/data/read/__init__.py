"""Files of text, tables and chats, record by record."""
