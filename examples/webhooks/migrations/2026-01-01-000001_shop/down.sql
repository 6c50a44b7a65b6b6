DROP TABLE orders;
DROP TABLE customers;
