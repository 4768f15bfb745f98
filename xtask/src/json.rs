//! As much JSON as cargo's messages and our own reports need: reading into a tree, and quoting a string.

/// A JSON value.
#[derive(Debug, PartialEq)]
pub enum Value {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// Any number, as a double.
    Number(f64),
    /// A string, unescaped.
    Text(String),
    /// An array.
    Array(Vec<Value>),
    /// An object, in the order written.
    Object(Vec<(String, Value)>),
}

impl Value {
    /// Reads one value that fills `text`; `None` if it is anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let mut reader = Reader { rest: text };
        let value = reader.value()?;
        reader.skip_space();
        reader.rest.is_empty().then_some(value)
    }

    /// A member of an object.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// A string's text.
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// An array's items; none for anything else.
    pub fn items(&self) -> &[Self] {
        if let Self::Array(items) = self { items } else { &[] }
    }
}

/// `text` as a JSON string, with its quotes.
pub fn quote(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            c if c < ' ' => quoted.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn value(&mut self) -> Option<Value> {
        self.skip_space();
        for (word, value) in [("null", Value::Null), ("true", Value::Bool(true)), ("false", Value::Bool(false))] {
            if self.take(word) {
                return Some(value);
            }
        }
        match self.rest.chars().next()? {
            '"' => self.text().map(Value::Text),
            '[' => self.list('[', ']', Self::value).map(Value::Array),
            '{' => self.list('{', '}', Self::member).map(Value::Object),
            _ => self.number().map(Value::Number),
        }
    }

    fn member(&mut self) -> Option<(String, Value)> {
        self.skip_space();
        let name = self.text()?;
        self.skip_space();
        self.take(":").then_some(())?;
        Some((name, self.value()?))
    }

    fn list<T>(&mut self, open: char, close: char, item: fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.rest = self.rest.strip_prefix(open)?;
        let mut items = Vec::new();
        self.skip_space();
        while !self.rest.starts_with(close) {
            items.push(item(self)?);
            self.skip_space();
            if !self.take(",") {
                break;
            }
        }
        self.rest = self.rest.strip_prefix(close)?;
        Some(items)
    }

    fn text(&mut self) -> Option<String> {
        self.rest = self.rest.strip_prefix('"')?;
        let mut text = String::new();
        let mut chars = self.rest.chars();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => match chars.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    'u' => {
                        let digits = chars.as_str().get(..4)?;
                        // Half of a surrogate pair stands for no character of its own.
                        text.push(char::from_u32(u32::from_str_radix(digits, 16).ok()?).unwrap_or('\u{fffd}'));
                        chars = chars.as_str()[4..].chars();
                    }
                    other => text.push(other),
                },
                other => text.push(other),
            }
        }
        self.rest = chars.as_str();
        Some(text)
    }

    fn number(&mut self) -> Option<f64> {
        let end =
            self.rest.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        digits.parse().ok()
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, word: &str) -> bool {
        self.rest.strip_prefix(word).map(|rest| self.rest = rest).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_quotes() {
        let text = "a \"b\" \\ c\n\u{1} é";
        assert_eq!(Value::parse(&quote(text)), Some(Value::Text(text.into())));
    }

    #[test]
    fn reads_nested_values() {
        let value = Value::parse(r#" {"a": [1, -2.5e1, null, true], "b": {"c": "\u0041\t"}, "d": []} "#).unwrap();
        assert_eq!(value.get("a").unwrap().items()[1], Value::Number(-25.0));
        assert_eq!(value.get("b").unwrap().get("c").unwrap().text(), Some("A\t"));
        assert!(value.get("d").unwrap().items().is_empty());
    }

    #[test]
    fn refuses_what_is_not_json() {
        for text in ["", "{", "[1 2]", "{\"a\" 1}", "\"open", "1 2", "tru"] {
            assert_eq!(Value::parse(text), None, "{text}");
        }
    }
}
