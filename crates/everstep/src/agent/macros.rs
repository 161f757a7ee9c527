//! Replaces `$name` and `${name}` in arguments and prefixes, like Python's
//! `string.Template.safe_substitute`: `$$` is a dollar sign, and an unknown name stays as it is.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Like [`substitute`], for an argument that need not be text.
pub fn substitute_raw(argument: &OsStr, values: &[(&str, &str)]) -> OsString {
    if let Some(text) = argument.to_str() {
        return substitute(text, values).into();
    }
    // Names and values are ASCII, so each byte may stand for a character.
    let text: String = argument.as_bytes().iter().map(|b| char::from(*b)).collect();
    OsString::from_vec(substitute(&text, values).chars().map(|c| c as u8).collect())
}

/// Replaces the names in `values`.
pub fn substitute(text: &str, values: &[(&str, &str)]) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            result.push('$');
            rest = after;
            continue;
        }
        let (name, length) = match rest.strip_prefix('{').and_then(|r| r.split_once('}')) {
            Some((name, _)) if is_name(name) => (name, name.len() + 2),
            _ => {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
                (&rest[..end], end)
            }
        };
        match values.iter().find(|(n, _)| *n == name && is_name(name)) {
            Some((_, value)) => {
                result.push_str(value);
                rest = &rest[length..];
            }
            None => result.push('$'),
        }
    }
    result + rest
}

fn is_name(text: &str) -> bool {
    let mut letters = text.chars();
    letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::substitute;

    #[test]
    fn as_python_does() {
        let v = [("local_rank", "3")];
        let cases = [
            ("--r=${local_rank}", "--r=3"),
            ("$local_rank/$local_ranks", "3/$local_ranks"),
            ("$$local_rank $$", "$local_rank $"),
            ("${other} ${local_rank} ${", "${other} 3 ${"),
            ("cost $5 ${1}", "cost $5 ${1}"),
            ("$", "$"),
        ];
        for (given, wanted) in cases {
            assert_eq!(substitute(given, &v), wanted, "{given}");
        }
    }
}
