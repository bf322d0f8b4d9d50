"""Views render what the layers below computed. They compute no metric themselves."""
